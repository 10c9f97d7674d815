"""The part of the API that looks at things and manages them; nothing here computes."""
