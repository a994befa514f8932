"""Checkpoints: three formats over one file layer, and readers that trust no input.

A checkpoint is a folder; many stand in one root::

    root/step-00000012-3fa94c11-7be2/     step, run, attempt
        rank-00000.safetensors            tensors; any reader of safetensors opens it
        rank-00000.json                   index: what lies where, dtypes, a checksum of each chunk
        rank-00001.safetensors, ...       as many pairs as the format has writers
        manifest.json                     strategy, mesh, optimizer, step, checksums of the indexes

    save      data files, fsync -> indexes, fsync -> manifest.json.part, fsync -> the folder, fsync
              -> rename to manifest.json -> the folder, fsync
    killed    anywhere before the rename: no manifest, hence no checkpoint; the last one stays

Where to read: ``checkpointing`` saves and loads for a system, whose state ``contents`` lists.
``full``, ``sharded`` and ``asynchronous`` are the formats.  ``agreement`` says which rank writes
what, ``data_file`` how tensors lie in a file, ``manifest`` what is said of them, ``root`` when a
checkpoint counts and which old ones go, ``files`` what touches the disk.  ``loading`` puts a
checkpoint into a system; ``reading`` opens its files.
"""
