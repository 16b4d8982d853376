"""One problem of a task, and the verifier of its answer."""

from dataclasses import dataclass, field
from hashlib import sha256

from regress.errors import TaskError
from regress.tasks.conversation_turns import parse_answer

WHITESPACE = " \t\r\n"


@dataclass(frozen=True)
class Problem:
    """A prompt and its only correct answer.

    `solution` holds the completions of a conversation that ends with the answer, in turn, such as a tool's call
    and the answer; empty where the answer alone is the completion.
    `task_id` identifies the content (task, prompt, answer): equal problems have equal ids on every machine
    and in every run, whatever seed drew them. `level` is its difficulty from 1 up and `complexity` its own from 0 to
    10 (see `regress.tasks.difficulty_vocabulary`); None where nobody has told. A prompt that was given as token ids has
    them in `tokens`, and their numbers as its text.
    """

    task: str
    prompt: str
    answer: str
    level: int | None = 1
    solution: tuple[str, ...] = ()
    complexity: float | None = None
    tokens: tuple[int, ...] | None = None
    task_id: str = field(init=False)

    @property
    def completions(self) -> tuple[str, ...]:
        """The completions of a right conversation; a single one where the answer is given at once."""
        return self.solution or (self.answer,)

    def __post_init__(self) -> None:
        if not self.answer or self.answer != self.answer.strip(WHITESPACE):
            raise TaskError(f"""task {self.task!r}: the answer {self.answer!r} to {self.prompt!r} is empty or has outer
            whitespace, so no completion could ever equal it: strip it in the generator""")
        content = "\x00".join((self.task, self.prompt, self.answer))
        object.__setattr__(self, "task_id", sha256(content.encode()).hexdigest()[:16])


def is_correct(problem: Problem, completion: str) -> bool:
    """Return True if the completion equals the answer, bare or between answer marks, ignoring outer ASCII whitespace
    only.

    Text is compared and never parsed: "07", "+7" and a full-width 7 are not "7", and nothing a model writes
    is ever evaluated or converted.
    """
    return problem.answer in (completion.strip(WHITESPACE), parse_answer(completion))
