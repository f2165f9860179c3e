"""Numbers of tokens as users write them."""

import re

from deltanet_hf.errors import UserError


def parse_tokens(value: str, option: str) -> int:
    """Parses '32768' or '32k', in 1,024 tokens, into a number of tokens; `option` begins the error."""
    match = re.fullmatch(r"(\d{1,9})(k?)", value, re.ASCII)
    if not match or not int(match[1]):
        raise UserError(f"{option}: '{value}' is no length in tokens; write it as 32768 or 32k")
    return int(match[1]) * (1024 if match[2] else 1)
