"""`python -m tinkex.server` is `tinkex serve`."""

from tinkex.server.serve import serve

if __name__ == "__main__":
    serve()
