"""What several parts must agree on, declared once as data: losses, optimizers, sampling parameters.

Client and server refuse by these declarations, both engines compute by them, OpenAPI and the docs
print them. Standard library only, so that every package may read it, on any machine.
"""
