"""PyTorch's checkpoints for the adapters: ``torch.distributed.checkpoint`` and full state dicts.

    format      who writes                                      file
    dcp         every rank, what it holds                       ``dcp.save``, ``dcp.load``
    dcp_async   a thread of every rank, from a copy             ``dcp.async_save``, ``dcp.load``
    full        rank 0, whole tensors                           ``torch.save``, ``torch.load``

A checkpoint is a folder ``step-00000012`` in the root, and counts once its last file is renamed:
torch's ``.metadata``, or ``checkpoint.pt``.  ``state`` says what is saved, ``blocks`` how a rank
hands over several blocks of one tensor, ``folders`` which checkpoints there are, ``dcp`` and
``full`` are the formats, ``options`` what a scenario may choose.

Everything is called as torch documents it, and nothing that it gets wrong is put right here: a
flipped bit and another dtype are loaded without a word, buffers of data-parallel ranks come from
any of them, a load that fails leaves what it has read so far (docs/findings.md).
"""
