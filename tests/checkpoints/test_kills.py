"""A process that is killed at any moment of saving leaves a complete checkpoint, and never less than it had."""

import multiprocessing
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from evenly.checkpoints import folder
from tests.checkpoints.saving_programs import save_steps, save_until_killed
from tests.processes import PRELOADED

FIRST_GUESS_S = 0.05  # of the seconds that a checkpoint takes


class Killer:
    """Starts a program that saves, kills it in a random moment of a random checkpoint, and again."""

    def __init__(self, root, seed: int) -> None:
        self._root, self._random = root, random.Random(seed)
        self._save_s = FIRST_GUESS_S
        self.resumes, self.last = 0, 0  # how often it has resumed, and the last step that it said was complete

    def kill(self) -> None:
        """Starts the program, which is forked from a server that has torch imported, and kills it."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=save_until_killed, args=(str(self._root), sender))
        process.start()
        sender.close()
        try:
            resumed = self._step(receiver)
            for _ in range(self._random.randrange(3)):
                began = time.monotonic()
                self._step(receiver)
                self._save_s = time.monotonic() - began
            time.sleep(self._random.uniform(0, self._save_s))
        finally:
            process.kill()
            process.join()
        assert resumed >= self.last, "a checkpoint that was complete is lost"
        self.resumes += 1
        self.last = resumed
        while receiver.poll():
            try:
                self.last = receiver.recv()
            except EOFError:
                break
        receiver.close()

    def _step(self, receiver) -> int:
        assert receiver.poll(60), "the program does not go on"
        step = receiver.recv()
        assert isinstance(step, int), step
        return step


def require_resumes(root, count: int, *, seed: int = 24) -> None:
    killer = Killer(root, seed)
    for _ in range(count):
        killer.kill()
    assert killer.resumes == count
    assert killer.last > count // 2
    save_steps(root, [killer.last + 5])
    assert [folder.step_of(path) for path in folder.checkpoints(root)][-1] == killer.last + 5
    assert len(list(root.iterdir())) == 2, "what the killed ones left is cleared"


def test_a_few_kills_leave_complete_checkpoints(tmp_path):
    require_resumes(tmp_path / "checkpoints", 8)


@pytest.mark.slow
def test_200_kills_at_random_moments_of_saving_leave_200_complete_checkpoints(tmp_path):
    with ThreadPoolExecutor(4) as pool:  # most of the time is spent waiting
        list(pool.map(lambda run: require_resumes(tmp_path / f"run-{run}", 51, seed=run), range(4)))  # 50 kills each
