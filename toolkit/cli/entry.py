"""The console command `dmt`."""


def main() -> int:
    """Run `dmt`; Ctrl-C while it is imported ends it without a traceback, too."""
    try:
        from toolkit.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130
