"""kill -9 at random instants under load: nothing wrong, nothing lost track of, nothing left lying about."""

import random
import time
from pathlib import Path

from harness.consistency import assert_consistent, opened
from harness.forkserver import ForkServer
from harness.workload import Board

PROCESSES = 3
BUDGET = 6 << 20
KILLS = 500
WITH_INTENT = 400
CHECK_EVERY = 50
MOST = 1500


class Killer:
    """Keeps some processes at work over one tier and kills them."""

    def __init__(self, server: ForkServer, shm: Path, seed: int):
        self._server = server
        self._path = shm / "tier"
        self._board_path = shm / "board"
        self._board = Board(self._board_path, PROCESSES)
        self._dice = random.Random(seed)
        self._pids: list[int] = [0] * PROCESSES
        self._next_seed = seed * 1000
        self.kills = self.with_intent = self.without_file = self.rounds = 0
        self.objects: list[int] = []

    def start(self, slot: int) -> None:
        """A new process for a slot."""
        self._board.clear(slot)
        self._next_seed += 1
        self._pids[slot] = self._server.start(
            "harness.workload:run", str(self._path), BUDGET, str(self._board_path), slot, self._next_seed
        )

    def wait_for_the_moment(self, slot: int) -> None:
        """Any moment, mostly one between reserving and committing."""
        dice = self._dice
        if dice.random() < 0.15:
            time.sleep(dice.random() * 0.03)
            return
        deadline = time.monotonic() + 20
        for following in range(dice.randrange(3), -1, -1):  # not always its first store
            while not self._board.writing(slot):
                self.assert_alive(slot, deadline)
            while following and self._board.writing(slot):
                self.assert_alive(slot, deadline)
        time.sleep(dice.choice((0.0, 0.0, 0.0001, 0.0003, 0.001)) * dice.random())

    def assert_alive(self, slot: int, deadline: float) -> None:
        """Fails when a process ended by itself (its error is on stderr) or stands still."""
        assert time.monotonic() < deadline, "a process stands still"
        if self._dice.random() > 0.001:
            return
        state = Path(f"/proc/{self._pids[slot]}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "Z", "a process ended by itself"

    def kill(self, slot: int) -> None:
        """Kill and count: with an open intent only if its row is there afterwards."""
        code = self._server.kill(self._pids[slot])
        assert code == -9, f"a process ended by itself, with {code}"
        self.kills += 1
        self.rounds += self._board.rounds(slot)
        with self._index.read() as txn:
            self.with_intent += bool(self._index.intents_of(txn, self._board.owner(slot)))

    def round(self) -> None:
        """A few dozen kills, the last ones of everybody at once; then everything must be right."""
        with opened(self._path, BUDGET) as tier:
            self._index = tier._live()
            for slot in range(PROCESSES):
                self.start(slot)
            for _ in range(CHECK_EVERY - PROCESSES):
                slot = self._dice.randrange(PROCESSES)
                self.wait_for_the_moment(slot)
                self.kill(slot)
                self.start(slot)
            time.sleep(0.1)
            for slot in range(PROCESSES):
                self.kill(slot)
        objects, without = assert_consistent(self._path, BUDGET)
        self.without_file += without
        self.objects.append(objects)


def test_kill(shm: Path) -> None:
    with ForkServer() as server:
        killer = Killer(server, shm, seed=1)
        while (killer.kills < KILLS or killer.with_intent < WITH_INTENT) and killer.kills < MOST:
            killer.round()
    print(
        f"{killer.kills} kills, {killer.with_intent} with an open intent; {killer.rounds} operations; "
        f"{killer.without_file} rows without file, mended; {killer.objects} objects at the checks"
    )
    assert killer.kills >= KILLS
    assert killer.with_intent >= WITH_INTENT
    assert min(killer.objects) > 20, "the processes stored next to nothing"
