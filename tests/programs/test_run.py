"""``python -m spdl_torch run``: programs do what they do under Python, on our loader."""

import os
import py_compile
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import ExitStack, closing

import pytest
import torch
from support import torchrun, warm
from support.loaders import library

from spdl_torch.__main__ import main
from spdl_torch.run.ending import _edit
from spdl_torch.run.loaders import Site

PROGRAMS = {
    "data.py": """
    import torch
    from torch.utils.data import Dataset

    class Squares(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.tensor([index / 8, index**2 / 64])

    def train(loader, epochs=2):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        return [p.tolist() for p in model.parameters()]
""",
    "script.py": """
    import os, sys
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    class Before(torch.utils.data.DataLoader):
        pass

    from data import Squares, train
    from torch.utils.data import DataLoader

    class Mine(DataLoader):
        def __init__(self, *args):
            super().__init__(*args, num_workers=2)

    if __name__ == "__main__":
        loaders = DataLoader(Squares(), 4, shuffle=True), Mine(Squares(), 4)
        loaders += (Before(Squares(), 8),)
        for loader in loaders:
            assert isinstance(loader, torch.utils.data.DataLoader)
            print(train(loader), len(loader))
        print(torch.get_num_threads(), sys.argv, __file__, __spec__, sys.path[0])
        print(type(__builtins__), type(__loader__))
        print(sys.modules["__main__"].Mine is Mine)
        sys.exit(3)
""",
    "package/__main__.py": """
    import sys, weakref
    import torch.utils.data as data
    from .data import Squares, train

    print(__name__, __package__, __spec__.name, sys.argv)
    loader = data.DataLoader(Squares(), 4, num_workers=2)
    print(train(loader))
    before, dataset = set(sys.modules), weakref.ref(loader.dataset)
    del loader
    print(sorted(set(sys.modules) - before), dataset())
""",
    "app/__main__.py": """
    import sys

    print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0])
    raise ValueError("of the program")
""",
    "children.py": """
    import multiprocessing, os
    from torch.utils.data import DataLoader
    from data import Squares, train

    class Sent:
        pass

    def child(method, end):
        end.send(Sent())
        print(method, __name__, train(DataLoader(Squares(), 4)), flush=True)

    if __name__ == "__main__":
        end, ours = multiprocessing.Pipe()
        train(DataLoader(Squares(), 8))
        for method in ("spawn", "fork", "forkserver"):
            context = multiprocessing.get_context(method)
            process = context.Process(target=child, args=(method, end))
            process.start()
            print(type(ours.recv()) is Sent, flush=True)
            process.join()
            print(process.exitcode)
        if not os.fork():
            raise SystemExit
        os.wait()
""",
    "refused.py": """
    import os, signal
    from torch.utils.data import DataLoader, IterDataPipe

    class Pipe(IterDataPipe):
        def __iter__(self):
            yield from range(3)

    loader = DataLoader(Pipe())
    print([batch.item() for batch in loader])
    try:
        DataLoader([1], batch_size=-1)
    except ValueError as error:
        print(error)
    os.kill(os.getpid(), signal.SIGINT)
""",
    "libraries.py": """
    import lightning
    import torch
    from accelerate import Accelerator
    from data import Squares
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(2, 1)

        def training_step(self, batch, _):
            return self.linear(batch).square().mean()

        def validation_step(self, batch, _, dataloader_idx=0):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def train_dataloader(self):
            return DataLoader(squares, 4, shuffle=True)

    model, squares = Model(), Squares()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(max_epochs=2, overfit_batches=4, accelerator="cpu", **quiet)
    several = [DataLoader(each, 4) for each in (squares, Squares())]
    trainer.fit(model, val_dataloaders=several)
    print(model.linear.weight.tolist())
    print(*Accelerator(cpu=True).prepare(DataLoader(Squares(), 4)))
    print(*StatefulDataLoader(Squares(), 4))
""",
    "trainer.py": """
    import torch, transformers
    from data import Squares

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(2, 1)

        def forward(self, point):
            return {"loss": self.linear(point).square().mean()}

    class Points(Squares):
        def __getitem__(self, index):
            return {"point": super().__getitem__(index)}

    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments("out", num_train_epochs=2, seed=3, **quiet)
    trainer = transformers.Trainer(Model(), arguments, train_dataset=Points())
    trainer.remove_callback(transformers.PrinterCallback)  # which prints how long it took
    trainer.train()
    print(trainer.model.linear.weight.tolist())
""",
    "long.py": """
    import sys, time
    from data import Squares
    from torch.utils.data import DataLoader, IterDataPipe

    class Many(Squares):
        def __len__(self):
            return 10**9

    class Pipe(IterDataPipe):
        def __iter__(self):
            return iter(Many())

    def loader():
        return DataLoader(Pipe() if "pipe" in sys.argv else Many(), 4)

    for _ in range(2):
        began = None
        for _ in loader():  # which has no name
            began = began or time.perf_counter()
            if time.perf_counter() - began > 1.1:
                break
    if "fail" in sys.argv:
        raise ValueError("of the program")
""",
    "endless.py": """
    import sys, time
    from data import Squares
    from torch.utils.data import DataLoader

    began = time.monotonic()
    while time.monotonic() - began < 30:
        try:
            for _ in DataLoader(Squares(), 4):
                pass
        except Exception:
            pass
    sys.exit("nothing has ended it")
""",
    "ranks.py": """
    import os, sys, time, torch, torch.distributed as dist
    from data import Squares
    from torch.utils.data import DataLoader, DistributedSampler

    class Slow(Squares):
        def __getitem__(self, index):
            time.sleep(0.08)
            return super().__getitem__(index)

    dist.init_process_group("gloo")
    sampler = DistributedSampler(Squares(), shuffle=False)
    if dist.get_rank() == 1:
        loader = DataLoader(Slow(), 4, sampler=sampler)
    elif "alone" in sys.argv:
        loader = torch.zeros(8, 4, 2)
    else:
        loader = DataLoader(Squares(), 4, sampler=sampler)
    for batch in loader:
        dist.all_reduce(batch)
    if dist.get_rank() == 0:
        print(batch.sum().item())
    dist.destroy_process_group()
    if "alone" in sys.argv and os.environ["RANK"] == "1" and not os.fork():
        list(DataLoader(Squares(), 4))
""",
}


@pytest.fixture
def folder(tmp_path):
    """A folder with the programs."""
    for name, text in {**PROGRAMS, "package/data.py": PROGRAMS["data.py"]}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


def start_cold(folder, *words):
    """A program that imports torch when it does."""
    options = {"cwd": folder, "text": True, "start_new_session": True}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, *words], **options, **pipes)


def start(folder, *words, **environment):
    """One that has torch imported from the start, and so have its children."""
    options = {"cwd": folder, "start_new_session": True}
    return warm.start(words, env={**os.environ, **environment}, **options)


def ended(process):
    """The exit status, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


UNDER_RUN = ("-m", "spdl_torch", "run")


def compared(*processes):
    """The status of a program and its complaints under Python and under run: it does the same."""
    (status, out, err), under_run = map(ended, processes)
    assert under_run[:2] == (status, out), under_run[2]
    return status, err, under_run[2]


def both_ways(folder, *words, start=start):
    """What a program does under Python and under run."""
    return compared(start(folder, *words), start(folder, *UNDER_RUN, *words))


SHORT = "spdl-torch run: less than 2 s of loading, no report: "


def sites(err):
    """The places of loaders without a report, as those that load for long have one."""
    return [
        place
        for line in err.splitlines()
        if line.startswith(SHORT)
        for place in line[len(SHORT) :].split(", ")
    ]


def test_script_trains_the_same(folder):
    """Two files, arguments, the loader and classes derived from it, and sys.exit(3); torch is
    imported when the program imports it."""
    words = "./script.py", "--loader", "-m"
    under_python = start(folder, *words, OMP_NUM_THREADS="1")
    status, _, err = compared(under_python, start_cold(folder, *UNDER_RUN, *words))
    assert status == 3
    assert sites(err) == ["script.py:17", "script.py:18"]


def test_module_trains_the_same(folder):
    """A package with relative imports. Nothing is imported or kept when a loader goes: Python drops
    what ends of objects raise, and Ctrl-C would be lost for as long as that takes."""
    status, _, err = both_ways(folder, "-m", "package", "--lr", "1", "--", "x")
    assert status == 0
    assert sites(err) == ["package/__main__.py:7"]


@pytest.mark.parametrize("words", [("./app/",), ("app.zip",), ("-m", "app")])
def test_program_that_fails_shows_its_own_traceback(words, folder):
    """A folder or an archive with a __main__.py, and a package: without runpy's frames and ours."""
    shutil.make_archive(str(folder / "app"), "zip", folder / "app")
    status, python_err, err = both_ways(folder, *words, "--lr", "1", start=start_cold)
    assert status == 1
    assert err.splitlines() == [x for x in python_err.splitlines() if "frozen runpy" not in x]


def test_compiled_program_runs(folder):
    """As under Python, with its names."""
    (folder / "short.py").write_text("print(__name__, __file__, __cached__, type(__loader__))")
    py_compile.compile(str(folder / "short.py"), str(folder / "short.pyc"))
    assert both_ways(folder, "short.pyc", start=start_cold)[0] == 0


def test_children_load_with_ours_and_report_once(folder):
    """Whether they are spawned, forked or a server's; a fork reports only on loaders of its own.
    The file has the figures of all, and each has its page."""
    words = *UNDER_RUN, "--record", "run.db", "--html", "page.html", "children.py"
    under_run = start_cold(folder, *words)  # so that its children are, too
    status, _, err = compared(start(folder, "children.py"), under_run)
    assert status == 0
    assert sites(err) == [*["children.py:11"] * 3, "children.py:15"]
    assert len(list(folder.glob("page.*html"))) == 4
    with closing(sqlite3.connect(folder / "run.db")) as file:
        runs = file.execute("SELECT count(*) FROM interval GROUP BY run_id").fetchall()
    assert runs == [(2,)] * 4, "both epochs"


def test_refused_loader_stays_torchs_and_ctrl_c_ends_it(folder):
    """One line says where and why. What torch refuses, too, it refuses as under Python. The page,
    whose imports have Python forget Ctrl-C, leaves the status."""
    under_run = start_cold(folder, *UNDER_RUN, "--html", "page.html", "refused.py")
    status, _, err = compared(start(folder, "refused.py"), under_run)
    assert (folder / "page.html").exists()
    assert status == -signal.SIGINT
    (line,) = (each for each in err.splitlines() if "torch's own loader stays" in each)
    assert line.startswith("spdl-torch run: refused.py:9: ")
    assert "DataPipe" in line


def test_libraries_that_make_loaders_have_ours(folder):
    """Lightning makes loaders anew, those of its hooks and of several with one dataset, too, and
    Accelerate wraps one: they stay the program's. torchdata's derives from torch's, and loads by
    itself."""
    status, _, err = both_ways(folder, "libraries.py")
    assert status == 0
    assert sites(err) == ["libraries.py:30", "libraries.py:25", "libraries.py:33"]


def test_loader_that_a_library_derives_is_ours(folder):
    """It is the program's: the report names its line. The edit is none of the library's file."""
    library("monai")
    text = """
        import time, torch
        from monai.data import DataLoader, Dataset

        loader = DataLoader(Dataset([1.0, 2.0]), 2)
        print(*loader, isinstance(loader, torch.utils.data.DataLoader), len(loader))
        began = time.perf_counter()
        while time.perf_counter() - began < 4:
            list(loader)
    """
    (folder / "derived.py").write_text(textwrap.dedent(text))
    status, _, err = both_ways(folder, "derived.py", start=start_cold)
    assert status == 0
    assert "spdl-torch run: derived.py:5: Dataset of 2, " in err
    assert "EDIT     at the program's top, before monai: import torch.utils.data, spdl_torch" in err


def test_hugging_faces_trainer_trains_the_same(folder):
    """It makes the loader itself."""
    pytest.importorskip("transformers")
    status, _, err = both_ways(folder, "trainer.py")
    assert status == 0
    assert "called at trainer.py:22" in sites(err)


def test_report_and_page_and_file_are_of_the_program(folder, capsys):
    """Though it fails. The report has its edit; page and statistics file have the loader, too."""
    words = ["--html", "page.html", "--record", "run.db", "long.py", "fail"]
    status, out, err = ended(start(folder, *UNDER_RUN, *words))
    assert (status, out) == (1, "")
    assert "ValueError: of the program" in err
    assert "long.py:15: Many of 1,000,000,000, batch_size=4, num_workers=0" in err
    assert "VERDICT" in err
    assert re.search(r"^window 2\.[2-9] s", err, re.M), "both epochs"
    assert "long.py:4: leave DataLoader out; add: from spdl_torch import DataLoader" in err
    assert "long.py:15" in (folder / "page.html").read_text()
    assert main(["report", str(folder / "run.db")]) == 0
    assert "VERDICT" in capsys.readouterr().out


def test_datasets_of_one_line_are_told_apart(folder):
    """By their class and length. Places of short ones stand in one line, once each."""
    text = "import time\nfrom torch.utils.data import DataLoader\nfrom data import Squares\n"
    text += "class Many(Squares):\n def __init__(self, n):\n  self.n = n\n"
    text += " def __len__(self):\n  return self.n\nfor n in (4, 3, 10**9, 2):\n"
    text += " began = time.perf_counter()\n for _ in DataLoader(Many(n)):\n"
    text += "  if time.perf_counter() - began > 2.1:\n   break\n"
    (folder / "lengths.py").write_text(text)
    status, _, err = ended(start(folder, *UNDER_RUN, "--", "lengths.py"))
    assert status == 0
    assert re.findall(r"^spdl-torch run: (.*?)(?:,.*)?$", err, re.M) == [
        "lengths.py:11: Many of 1",
        "less than 2 s of loading",
    ]
    assert err.endswith(f"{SHORT}lengths.py:11\n")


@pytest.mark.parametrize("words", [("--loader", "torch", "long.py"), ("long.py", "pipe")])
def test_torchs_loader_is_watched(words, folder):
    """Where it is asked for, and where ours refuses: its own class loads, and is timed."""
    status, _, err = ended(start(folder, *UNDER_RUN, *words))
    assert status == 0
    first, *text = err[err.rindex("\nspdl-torch run: long.py:15: ") :].split("\n")[1:]
    assert first.endswith("batch_size=4, num_workers=0")
    labels = [line.split()[0] for line in text if line[:1].isalpha()]
    assert labels == ["VERDICT", "WHY", "NEXT"]
    said = " ".join(" ".join(text).split())
    assert re.search(r"A step of .* ms waits .* ms in next\(\) and takes .* ms in the loop", said)
    assert "costs nothing" in said


def test_comparison_ends_the_program_in_turns(folder, monkeypatch, capsys):
    """By an exception that it does not catch by accident. It says before what happens, and at the
    end what each loop gained."""
    monkeypatch.chdir(folder)
    with open("turns.txt", "w") as file:

        def begin(words):  # without the flags of this interpreter
            return warm.start(words[words.index("-c") :], stdout=file, stderr=file)

        monkeypatch.setattr(subprocess, "Popen", begin)
        status = main(["run", "--compare", "1", "endless.py"])
    out, err = capsys.readouterr()
    assert status == 0, (folder / "turns.txt").read_text()
    first, *turns = err.splitlines()
    assert "the program runs 4 times" in first
    assert [line.split()[-1] for line in turns] == ["torch", "ours", "ours", "torch"]
    figures = (
        r"endless\.py:9, .*: batches/s",
        r"endless\.py:9, .*: s to first batch",
        "peak memory, MiB",
    )
    for line, figure in zip(out.splitlines()[1:], figures, strict=sys.platform == "linux"):
        assert re.match(rf"{figure} +[\d.,]*[1-9][\d.,e-]* ±", line)
    assert len({line.rindex(" (") for line in out.splitlines()[1:]}) == 1, "columns"


@pytest.mark.parametrize(
    ("words", "last", "waits"), [([], "502.6875", "rank 0 .* %, "), (["alone"], "255.3125", "")]
)
def test_first_of_several_ranks_reports_on_the_slowest(words, last, waits, folder):
    """As torchrun starts them, in text and on the page; the first of those that load, for which no
    fork of it speaks."""
    with torchrun.environments(2) as each, ExitStack() as stack:
        words = *UNDER_RUN, "--html", "page.html", "ranks.py", *words
        started = [start(folder, *words, **rank) for rank in each]
        ranks = [stack.enter_context(rank) for rank in started]
        (status, out, err), (other_status, _, other_err) = map(ended, ranks)
    out = re.sub(r"\[Gloo\].*\n", "", out)  # of torch 2.9
    assert (status, other_status, out) == (0, 0, f"{last}\n"), err
    shown, nothing = (err, other_err) if waits else (other_err, err)
    slowest = rf"takes {waits}rank 1 .* %: rank 1, shown above, is the slowest"
    assert re.search(slowest, " ".join(shown.split()))
    for text in (shown, (folder / "page.html").read_text()):
        assert "ranks.py:14" in text
        assert "ranks.py:18" not in text
    assert SHORT not in shown
    assert "ranks.py" not in nothing


@pytest.mark.parametrize(
    ("source", "edit"),
    [
        ("from torch.utils.data import (\n    Dataset,\n    DataLoader,\n)", "train.py:3: leave"),
        ("from torch.utils.data import Dataset\nclass A(data.DataLoader):", "train.py:7: import"),
        ("from spdl_torch import DataLoader", "none: the program names our loader already"),
    ],
)
def test_edit_is_of_the_line_that_names_torchs_loader(source, edit, tmp_path, monkeypatch):
    """An import in several lines, a name in a module, and a program that was edited; of a library,
    which is not to be edited, a line before its import."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(source)
    assert _edit(Site("train.py:7", "train.py", 7, "", "Squares")).startswith(edit)
    monai = _edit(Site("train.py:7", "monai/data/dataloader.py", 0, "monai", "Squares"))
    assert monai.startswith("at the program's top, before monai: import torch.utils.data, spdl")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a program"),
        (["none.py"], "can't open file"),
        (["--loader", "torch", "--html", "x", "y.py"], "alone"),
        (["-"], "standard input is not run"),
        (["-c", "pass"], "-c or of standard input is not run"),
        (["--compare", "1", __file__], "for one rank"),
        *(
            (["--compare", "1", "--loader", name, __file__], "not allowed with argument --compare")
            for name in ("ours", "torch")
        ),
    ],
)
def test_command_that_cannot_run_says_why(words, message, capsys, monkeypatch):
    """With status 2; torch's loader stays where it is."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = torch.utils.data.DataLoader
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(["run", *words]))
    assert message in capsys.readouterr().err
    assert torch.utils.data.DataLoader is before
