"""A rehearsal worker that never ends."""

import time

if __name__ == "__main__":
    time.sleep(3600)
