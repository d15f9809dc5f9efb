"""What the selector raises for a request that it cannot serve."""


class SelectionError(ValueError):
    """A request that no rank can serve; raised before the first collective, from facts that every rank sees alike."""
