"""The wish to stop, as a signal brings it. Nothing stops at once: it is read at the boundaries of steps."""

import signal


class StopRequest:
    """Set by SIGTERM, SIGUSR1 or SIGINT; read at every boundary. Installing it lets held-back signals through."""

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
