"""Integer arithmetic for grids and tiles."""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. (Triton's own version costs ten times as much on the host.)"""
    return -(-a // b)


def power_of_two(n: int, least: int = 16) -> int:
    """The next power of two, at least `least`: a tile's size for n elements."""
    return max(least, 1 << (n - 1).bit_length())
