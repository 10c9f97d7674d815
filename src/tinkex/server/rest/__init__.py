"""The part of the API that looks at things and manages them; nothing here computes.

`install` prepares what the routes find on `app.state` (`auth`, `shelf`, `signer`) and mounts them.
"""

from tinkex.server.rest.install import install

__all__ = ["install"]
