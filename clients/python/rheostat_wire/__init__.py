"""Code that client and server share: the generated messages, and the encodings of tensors.

It imports neither client nor server.
"""
