"""Lossy compression of gradients: reducers that send less than the full gradient.

    method      a rank sends of n elements               the others are not told
    cast        n values of another dtype                what rounding loses
    topk        density n values, and their indices      all but the largest
    randomk     density n values                         all but a mask that all ranks draw alike
    powersgd    r (n1 + n2) of a matrix of n1 n2         all but r directions
    sign        n bits and a magnitude, there and back   all but signs; the majority's come back
    onebit      n bits and a magnitude, there and back   all but signs, on both ways

Every parameter is compressed by itself, so nothing depends on buckets: where they end, in which
order they come, that they are laid out anew.  Each method is a file; read topk.py first.
``compressor.py`` is what they share, ``feedback.py`` what a rank remembers of what it did not send,
``emulators.py`` the same methods on one process, which is what they are judged by.
"""
