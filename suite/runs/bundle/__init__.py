"""One archive of a run that ``shardproof verify`` accepts on another machine.

    <run-id>.tar.gz: <run-id>/bundle.json       names, sizes and SHA-256 of all that follows
                              run.json, planned.jsonl, cases.jsonl, manifest.jsonl
                              records/, times/  what the verdicts are made of
                              report.html, report.md, junit.xml

:func:`pack` takes what the manifest seals and the reports, nothing else, and tells what it left
out.  One run gives one archive: files in order, no times, users or modes; the *digest* of a bundle
is that of its list, whatever compressed it.  :func:`unpacked` trusts nothing of an archive.

``form``       names, limits and the list      ``packing``   a run's folder -> archive
``unpacking``  archive -> a temporary folder, opened as a run

Judging again needs the archive and this suite: no scenario, data set, implementation or GPU, and
any torch that the suite runs with.  Another version of the suite may judge otherwise, so the list
says by which versions the run was judged.
"""
