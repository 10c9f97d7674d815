"""What administrators see and do, and what lies in a data folder."""
