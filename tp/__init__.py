"""Worlds: where ranks live, what they talk through, and the ledger of what they did."""
