"""The console command `dmt`."""


def main() -> int:
    """Run `dmt`. Ctrl-C never shows a traceback, even while modules are still being
    imported."""
    try:
        from toolkit.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130
