"""A run, shown: on the terminal, as Markdown, and as one self-contained page."""

from shardproof.report.kills import verdict_counts as verdict_counts
from shardproof.report.page import html as html
from shardproof.report.tables import closing as closing
from shardproof.report.tables import left_out as left_out
from shardproof.report.tables import medians as medians
from shardproof.report.tables import skips as skips
from shardproof.report.terminal import show as show
from shardproof.report.terminal import show_broken as show_broken
from shardproof.report.terminal import show_kills as show_kills
from shardproof.report.text import document as document
from shardproof.report.text import insert as insert
from shardproof.report.text import markdown as markdown
