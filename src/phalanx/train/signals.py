"""Stop requests by signals. They do not take effect at once, but at step boundaries."""

import signal


class StopRequest:
    """Set by SIGTERM, SIGUSR1 or SIGINT; read at step boundaries. Installing it unblocks blocked signals."""

    def __init__(self) -> None:
        self.requested = False

    def install_handlers(self) -> None:
        """Handle the signals in this process (main thread only)."""
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        for number in numbers:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def _on_signal(self, *_: object) -> None:
        self.requested = True
