"""Systematic faults: operators over the syntax trees of ``impls/reference``.

Hand-written faults show what their authors thought of.  ``operators`` lists every place where an
operator applies, ``planted`` runs a strategy with one such fault, ``reached`` knows which lines a
case executes, and ``study`` tells which faults survive.
"""
