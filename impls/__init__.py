"""The systems under test: implementations of distributed training, one folder per family.

Everything here imports the contract and the communicator of the suite and nothing else of it.
"""
