"""Makes `chat_models` importable, as the other folders do with their helpers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
