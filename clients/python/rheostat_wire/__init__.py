"""Code that client and server share: the generated messages, and the encodings of numbers in them.

Both import this package, so that they cannot disagree about a byte. It imports neither.
"""
