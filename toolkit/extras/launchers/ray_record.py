"""What Ray's workers did with the ranks, in a file of the run directory: where each attempt
began, and how each of its ranks ended. All machines share it, and it outlives them."""

from contextlib import suppress

from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE
from toolkit.launchers.outcome import RankExit
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset
from toolkit.run.recorded import read_events


class RayRecord:
    """The record of one launch."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._file = run.handed_over.with_name("ray.jsonl")

    def clear(self) -> None:
        """Forget the launch before."""
        self._file.unlink(missing_ok=True)

    def begin(self) -> int:
        """Note that the ranks are about to start; returns how often they did before."""
        before = sum("offset" in line for line in jsonl.read(self._file))
        jsonl.append_where_room(self._file, {"offset": events_offset(self._run.path)})
        return before

    def end(self, one: RankExit) -> None:
        """Note how a rank ended."""
        jsonl.append_where_room(self._file, {"rank": one.rank, "code": one.code})

    def last(self) -> tuple[int | None, list[RankExit]]:
        """Of the last attempt: where its events begin, None without one, and the ranks that
        have failed, the first one first."""
        lines = []
        with suppress(OSError):  # of a shared disk; the next look may do better
            lines = jsonl.read(self._file)
        begins = [number for number, line in enumerate(lines) if "offset" in line]
        if not begins:
            return None, []
        ends = [RankExit(line["rank"], line["code"]) for line in lines[begins[-1] + 1 :]]
        failed = [one for one in ends if one.code not in (EXIT_DONE, EXIT_RESUMABLE)]
        return int(lines[begins[-1]]["offset"]), failed

    def at_work(self) -> bool:
        """Whether the ranks train: they have something to save, and can."""
        offset, failed = self.last()
        if offset is None or failed:
            return False
        with suppress(OSError):
            events = read_events(self._run.events, offset)
            return any(event["kind"] == "start" for event in events)
        return True
