"""Messages on standard error."""

import sys

from phalanx.std_streams import escape_control_chars


def print_warning(text: str) -> None:
    """Print a warning; control characters in it are escaped, since a run may come from a stranger."""
    print(f"warning: {escape_control_chars(text)}", file=sys.stderr)
