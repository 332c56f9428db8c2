"""What both ends of the wire share: the generated messages, and how numbers travel in them.

The client and the server import it. It imports neither.
"""
