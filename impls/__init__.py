"""The judged: implementations of distributed training, one folder a family.

Everything here imports the contract and the communicator of the suite and nothing else of it.
"""
