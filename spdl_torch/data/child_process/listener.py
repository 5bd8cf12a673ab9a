"""The answers of a worker process to questions: what is at work? what did the threads do?"""

from __future__ import annotations

import os
import pickle
import threading
from time import sleep
from typing import TYPE_CHECKING, Any

from ...engine.recorder.flight_recorder import FlightRecorder
from ...errors import PipelineStopped
from ..workers.activity import Activity, describe_activities
from .questions import answer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_FINISH_SECONDS = 5.0  # for the sample that is being fetched when the trainer is gone


class Listener:
    """Answers on a thread of its own, which otherwise sleeps. It keeps nothing of the user's: the
    dataset ends with its worker.
    """

    def __init__(self, control: Connection, pipeline_number: int, *, records: bool) -> None:
        self._control = control
        self._pipeline_number = pipeline_number
        self._records = records
        self.activity = Activity()
        """What the worker does now; the worker, on the main thread, writes it."""
        self._recorder: FlightRecorder | None = None

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="spdl-listener", daemon=True).start()

    def new_recorder(self) -> FlightRecorder:
        """Return the recorder of an epoch that begins; questions are about it from now on."""
        self._recorder = FlightRecorder("DataLoader", self._pipeline_number, enabled=self._records)
        return self._recorder

    def _run(self) -> None:
        """Answer until the trainer is gone; then end the process, if need be by force."""
        while True:
            try:
                number, question, argument = pickle.loads(self._control.recv_bytes())
                answer(self._control, number, self._reply(question, argument))
            except (EOFError, OSError):
                break
        # The main thread finds the connection closed as well, and ends the process after its
        # sample. If that does not return, the process ends here.
        sleep(_FINISH_SECONDS)
        os._exit(0)

    def _reply(self, question: str, argument: Any) -> Any:
        activity = self.activity
        try:
            is_idle = activity.job is None and not activity.beginning
            if question == "at_work" and is_idle:
                return "None of its threads is at work."  # it waits for a job, in our own code
            if question == "at_work":
                return describe_activities([activity], [threading.main_thread()], argument)
            return None if self._recorder is None else self._recorder.stages_copied()
        except PipelineStopped:
            return None
