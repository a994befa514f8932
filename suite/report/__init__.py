"""A run, shown: on the terminal, as Markdown, and as one self-contained page."""

from shardproof.report.forms import document as document
from shardproof.report.forms import html as html
from shardproof.report.forms import insert as insert
from shardproof.report.forms import markdown as markdown
from shardproof.report.forms import show as show
from shardproof.report.forms import show_broken as show_broken
from shardproof.report.forms import show_kills as show_kills
from shardproof.report.forms import show_survivors as show_survivors
from shardproof.report.kills import verdict_counts as verdict_counts
from shardproof.report.tables import closing as closing
from shardproof.report.tables import left_out as left_out
from shardproof.report.tables import skips as skips
