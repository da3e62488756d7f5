"""Numbers with their nouns, as people read them."""


def number_of(number: int, noun: str) -> str:
    """Say how many there are of what `noun` names, as in `1 GPU` and `2 worker slots`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
