"""The ImageNet programs: figures to be trusted, runs that can be resumed, clean ends."""

from __future__ import annotations

import copy
import importlib
import os
import re
import shutil
import signal
from argparse import Namespace
from contextlib import ExitStack

import _imagenet
import _imagenet_data
import _imagenet_figures
import _imagenet_model
import _torchrun
import _warm
import imagenet_classification as classification
import pytest
import torch
from _folders import ROOT
from PIL import Image
from torchvision import datasets
from torchvision.models import resnet18
from torchvision.transforms import v2

import spdl_torch
from spdl_torch.measuring.photographs import write_photographs

EXAMPLES = ROOT / "examples"
IMAGENET = ROOT.parent / "shared" / "data" / "imagenet"
NUM_TRAIN, NUM_VALIDATION = 24, 7
RATES = re.compile(r"[\d.]+ images/s|  waiting.*|; trained.*|\n  \w+: .*")

pytestmark = [
    # torch's loader forks, and warns of it where Python does (3.12).
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    # Lightning's own, with this torch.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*have overridden `on_after_batch_transfer`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A small ImageNet: train/ and val/ with ten classes, of which val/ has but seven."""
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder / "train", NUM_TRAIN)
    write_photographs(folder / "val", NUM_VALIDATION, seed=1)
    return folder


def write_pictures(folder, count):
    """Named as photographs are, where nothing depends on what is in them."""
    for index in range(count):
        path = folder / f"class_{index % 10}" / f"{index:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)


@pytest.fixture(autouse=True)
def intra_op_threads():
    """The programs' short form computes with one thread; later tests do with what they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def arguments(data, output, *more):
    """A run of one short epoch, on the CPU, where figures are the same every time."""
    own = ["--smoke", "--data", data, "--output", output, "--epochs", 1, "--image-size", 32]
    return [str(argument) for argument in (*own, "--device", "cpu", *more)]


def run_here(data, output, *more):
    """Run the plain loop in this process."""
    classification.main(arguments(data, output, *more))


def run(program, *more, code=0):
    """Run a program in a process of its own; what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = _warm.run([EXAMPLES / program, *more], env=environment)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def run_two_ranks(program, *more, preload=()):
    """The same, as torchrun starts two; what the first printed."""
    with _torchrun.environments(2) as each, ExitStack() as stack:
        environments = [{**os.environ, "OMP_NUM_THREADS": "1", **rank} for rank in each]
        ranks = [
            stack.enter_context(_warm.start([EXAMPLES / program, *more], env=env, preload=preload))
            for env in environments
        ]
        outputs = [rank.communicate(timeout=50) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return outputs[0][0]


def validation_of(printed):
    """The last line about validation: figures and number of images."""
    return re.findall(r"validation: (loss .* on \d+ images)", printed)[-1]


def without_rates(printed):
    """What does not depend on how fast the machine is."""
    return RATES.sub("", printed)


def options_for(data, *more):
    """As the programs read them."""
    parser = _imagenet.argument_parser("", output="unused")
    return _imagenet.parse(parser, arguments(data, "unused", *more))


@pytest.mark.parametrize("program", ["imagenet_classification", "imagenet_lightning"])
def test_program_runs_on_photographs_of_imagenet(program, tmp_path, capsys):
    """Real files, in one folder without train/ and val/: some are held out."""
    if not IMAGENET.is_dir():
        pytest.skip("there are no photographs beside the repository")
    if "lightning" in program:
        pytest.importorskip("lightning")
    importlib.import_module(program).main(arguments(IMAGENET, tmp_path))
    printed = capsys.readouterr().out
    assert re.search(r"epoch 1/1  step 6/6  \d+ images/s  loss [\d.]+  acc1", printed)
    assert "waiting for data" in printed
    assert validation_of(printed).endswith("on 20 images")
    assert list(tmp_path.glob("last.*"))


def test_ranks_count_every_validation_image_once_when_shards_are_uneven(
    photographs, tmp_path, capsys
):
    """Two ranks report what one process finds for the checkpoint that they saved."""
    given = arguments(photographs, tmp_path, "--lr", 0.001)
    printed = run_two_ranks("imagenet_classification.py", *given)
    assert "2 rank(s)" in printed
    run_here(photographs, tmp_path, "--eval-only", "--resume")
    alone = validation_of(capsys.readouterr().out)
    assert alone.endswith(f"on {NUM_VALIDATION} images")
    assert validation_of(printed) == alone


def test_resumed_run_equals_one_that_was_not_interrupted(
    photographs, tmp_path, capsys, monkeypatch
):
    """Weights, momentum, order, crops and mixup: the second epoch has the same figures."""
    recipe = ("--epochs", 2, "--mixup", 0.2, "--auto-augment", "ta_wide", "--ema-decay", 0.5)
    run_here(photographs, tmp_path / "whole", *recipe)
    whole = capsys.readouterr().out
    save = classification.save_checkpoint

    def save_and_interrupt(checkpoint, path):
        save(checkpoint, path)
        raise KeyboardInterrupt("after the first epoch")

    with monkeypatch.context() as patch:
        patch.setattr(classification, "save_checkpoint", save_and_interrupt)
        with pytest.raises(KeyboardInterrupt, match="after the first epoch"):
            run_here(photographs, tmp_path / "parts", *recipe)
    capsys.readouterr()
    run_here(photographs, tmp_path / "parts", *recipe, "--resume")
    resumed = capsys.readouterr().out
    second_epoch = "\n".join(re.findall("^epoch 2/2.*", whole, flags=re.M))
    assert second_epoch
    assert without_rates(second_epoch) in without_rates(resumed)
    assert "epoch 1/2" not in resumed


def test_loaders_have_the_same_figures_when_they_validate(photographs, tmp_path, capsys):
    """Threads or processes, every digit; torchvision's own folder within a level of a pixel."""
    figures = {}
    for loader in ("ours", "torch", "torchvision"):
        run_here(photographs, tmp_path, "--eval-only", "--loader", loader)
        printed = capsys.readouterr().out
        assert re.search(r"\d+ images/s after \d+ warm-up batches", printed)
        figures[loader] = validation_of(printed)
    assert figures["ours"] == figures["torch"]
    losses = [float(line.split()[1]) for line in figures.values()]
    assert losses == pytest.approx([losses[0]] * 3, abs=0.01)


def test_every_option_of_the_recipe_works_together(photographs, tmp_path, capsys):
    """Augmentation, mixing, averaging, precision and layout in one step each."""
    run_here(
        *(photographs, tmp_path, "--auto-augment", "ra", "--random-erase", 0.5, "--mixup", 0.2),
        *("--cutmix", 1, "--label-smoothing", 0.1, "--ema-decay", 0.9, "--amp", "--opt", "adamw"),
        *("--channels-last", "--norm-weight-decay", 0, "--clip-grad-norm", 1, "--workers", 1),
    )
    printed = capsys.readouterr().out
    assert "validation without averaging" in printed
    assert {path.name for path in tmp_path.iterdir()} <= {"last.pt", "best.pt"}


@pytest.mark.cuda
@pytest.mark.parametrize("loader", ["ours", "torch"])
def test_gpu_trains_and_validates_in_half_precision(loader, photographs, tmp_path):
    """fp16 with its scaler on a CUDA device, batches from either loader."""
    recipe = ("--device", "cuda", "--amp", "fp16", "--channels-last", "--loader", loader)
    given = arguments(photographs, tmp_path, *recipe)
    printed = run("imagenet_classification.py", *given, "--mixup", 0.2)
    assert "on cuda:0" in printed
    assert validation_of(printed).endswith(f"on {NUM_VALIDATION} images")
    alone = run("imagenet_classification.py", *given, "--eval-only", "--resume")
    assert validation_of(alone).endswith(f"on {NUM_VALIDATION} images")


def test_model_of_timm_runs_when_timm_is_there(photographs, tmp_path, capsys):
    """timm:NAME."""
    pytest.importorskip("timm")
    run_here(photographs, tmp_path, "--eval-only", "--model", "timm:mobilenetv3_small_050")
    assert validation_of(capsys.readouterr().out).endswith(f"on {NUM_VALIDATION} images")


def test_interrupt_ends_the_program_at_once_without_a_traceback(photographs, tmp_path):
    """Ctrl-C: code 130, one line that says how to go on."""
    given = arguments(photographs, tmp_path, "--epochs", 10_000)
    with _warm.start([EXAMPLES / "imagenet_classification.py", *given]) as program:
        while "step" not in program.stdout.readline():
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=50)
    assert program.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted; --resume goes on" in errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "no/such/folder"], "there is no such folder"),
        (["--data", "{photographs}/val/class_0"], "Expected train/<class>"),
        (["--model", "resnet19"], "Near it: resnet18"),
        (["--device", "cuda:9"], "torch sees"),
        (["--device", "toaster"], "--device toaster"),
        (["--amp", "fp16", "--device", "cpu"], "needs CUDA"),
        (["--epochs", "0"], "--epochs must be >= 1"),
        (["--resume", "no/such/file"], "there is no file"),
        (["--weights", "IMAGENET1K_V9"], "torchvision has IMAGENET1K_V1"),
        (["--weights", "{photographs}/val/class_0/00000.jpg"], "is not a readable checkpoint"),
    ],
)
def test_message_says_what_to_do_when_an_option_cannot_work(
    more, message, photographs, tmp_path, capsys
):
    """Code 2, and no traceback."""
    more = [argument.format(photographs=photographs) for argument in more]
    code = _imagenet.run_program(lambda: run_here(photographs, tmp_path, *more))
    assert code == 2
    assert message in capsys.readouterr().err


def test_earlier_run_is_not_overwritten_when_resume_was_forgotten(photographs, tmp_path):
    """A checkpoint of days is not lost to a typing error."""
    (tmp_path / "last.pt").touch()
    with pytest.raises(_imagenet.SetupError, match="Pass --resume"):
        run_here(photographs, tmp_path)


def test_bad_photograph_is_named_when_it_cannot_be_decoded(photographs, tmp_path, capsys):
    """Code 1."""
    folder = tmp_path / "data"
    write_photographs(folder, 12)
    bad = folder / "class_3" / "00003.jpg"
    bad.write_bytes(b"no photograph")
    code = _imagenet.run_program(lambda: run_here(folder, tmp_path / "output"))
    assert code == 1
    assert str(bad) in capsys.readouterr().err


def test_loss_that_is_not_finite_ends_the_run(photographs, tmp_path, capsys):
    """Code 1, instead of days of nan."""
    more = ("--lr", 1e30, "--lr-warmup-epochs", 0, "--limit", 24)
    code = _imagenet.run_program(lambda: run_here(photographs, tmp_path, *more))
    assert code == 1
    assert "Lower --lr" in capsys.readouterr().err


def test_one_folder_is_split_the_same_way_every_time(tmp_path):
    """Disjoint, complete, and by the files' names, not their order or place."""
    halves = []
    for place in ("one", "other"):
        write_pictures(tmp_path / place, 20)
        folders = _imagenet_data.open_folders(options_for(tmp_path / place, "--val-fraction", 0.2))
        assert sorted([*folders.train_indices, *folders.validation_indices]) == list(range(20))
        halves.append(folders.validation_indices)
    assert halves[0] == halves[1]
    assert len(halves[0]) == 4


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_share_the_validation_images(num_ranks, photographs):
    """Each image on exactly one rank, also where there are more ranks than images."""
    folders = _imagenet_data.open_folders(options_for(photographs))
    pixels = _imagenet_data.Pixels(size=32, resize=36)
    parts = [
        _imagenet_data.validation_dataset(folders, pixels, rank=rank, num_ranks=num_ranks).indices
        for rank in range(num_ranks)
    ]
    assert sorted(index for part in parts for index in part) == list(range(NUM_VALIDATION))


def test_train_is_not_needed_to_validate(photographs, tmp_path, capsys):
    """Only val/ is unpacked; val/ is not guessed from train/."""
    shutil.copytree(photographs / "val", tmp_path / "val")
    run_here(tmp_path, tmp_path / "output", "--eval-only")
    assert validation_of(capsys.readouterr().out).endswith(f"on {NUM_VALIDATION} images")
    with pytest.raises(_imagenet.SetupError, match="no train/"):
        run_here(tmp_path, tmp_path / "output")
    (tmp_path / "val").rename(tmp_path / "train")
    with pytest.raises(_imagenet.SetupError, match="no val/"):
        run_here(tmp_path, tmp_path / "output")


def test_classes_have_their_numbers_of_training_when_val_has_fewer(tmp_path):
    """A class that val/ has not does not shift the others."""
    write_pictures(tmp_path / "train", 10)
    write_pictures(tmp_path / "val", 10)
    for path in (tmp_path / "val" / "class_0").iterdir():
        path.unlink()
    (tmp_path / "val" / "class_0").rmdir()
    folders = _imagenet_data.open_folders(options_for(tmp_path))
    assert folders.validation.targets == list(range(1, 10))
    assert folders.validation[0][1] == 1


def test_class_is_refused_when_the_model_does_not_know_it(photographs):
    """Wrong accuracy would be the alternative."""
    folder = copy.copy(_imagenet_data.open_folders(options_for(photographs)).validation)
    with pytest.raises(_imagenet.SetupError, match="class 'class_0'"):
        _imagenet_data.relabel(folder, ["class_1", "class_2"])


def test_outputs_are_found_when_the_folder_has_fewer_classes(photographs, tmp_path, capsys):
    """Weights of other people, with --class-map and without."""
    torch.manual_seed(0)
    weights = resnet18(num_classes=12).state_dict()
    names = [f"class_{k}" for k in range(10)]
    figures = []
    for order in (["z", *names, "y"], ["y", *reversed(names), "z"]):
        if figures:  # the same network with its outputs in another order
            weights = {k: v.flip(0) if k.startswith("fc.") else v for k, v in weights.items()}
        torch.save(weights, tmp_path / "weights.pth")
        (tmp_path / "map.txt").write_text("\n".join(order))
        given = ("--eval-only", "--weights", tmp_path / "weights.pth")
        run_here(photographs, tmp_path, *given, "--class-map", tmp_path / "map.txt")
        figures.append(validation_of(capsys.readouterr().out))
    assert figures[0] == figures[1]
    with pytest.raises(_imagenet.SetupError, match="does not fit --model resnet18 with 10 classes"):
        run_here(photographs, tmp_path, *given)


def test_published_outputs_have_names_when_they_are_imagenets():
    """timm knows them; nobody guesses."""
    pytest.importorskip("timm")
    names = _imagenet_model.published_classes(1000, ["n01440764", "n15075141"])
    assert (names[0], names[-1]) == ("n01440764", "n15075141")
    with pytest.raises(_imagenet.SetupError, match="--class-map FILE"):
        _imagenet_model.published_classes(1000, ["cat", "dog"])


def test_weights_of_another_folder_are_where_training_begins(photographs, tmp_path, capsys):
    """All but the last layer are taken over."""
    torch.save(resnet18(num_classes=12).state_dict(), tmp_path / "weights.pth")
    options = options_for(photographs, "--weights", tmp_path / "weights.pth")
    built = _imagenet_model.build_model(options, ["one", "two", "three"])
    assert built.model.fc.out_features == 3
    assert torch.equal(built.model.conv1.weight, torch.load(options.weights)["conv1.weight"])
    assert "begin at random: fc.bias, fc.weight" in capsys.readouterr().err


def test_input_equals_the_usual_transform(photographs):
    """Bytes that are normalised on the device are what ToTensor and Normalize make of them."""
    pixels = _imagenet_data.Pixels(size=32, resize=36)
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    usual = v2.Normalize(pixels.mean, pixels.std)(v2.functional.to_dtype(images, scale=True))
    for channels_last in (False, True):
        ours = _imagenet_model.to_input(pixels, channels_last=channels_last)(images)
        torch.testing.assert_close(ours, usual, rtol=0, atol=2e-6)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert ours.is_contiguous(memory_format=layout)


def test_validation_pixels_are_torchvisions(photographs):
    """Within one level of torchvision's own folder with the reference transforms."""
    options = options_for(photographs)
    pixels = _imagenet_data.Pixels(size=64, resize=73)
    folders = _imagenet_data.open_folders(options)
    ours = _imagenet_data.validation_dataset(folders, pixels, rank=0, num_ranks=1)
    reference = datasets.ImageFolder(
        str(photographs / "val"),
        v2.Compose([v2.Resize(73), v2.CenterCrop(64), v2.PILToTensor()]),
    )
    assert isinstance(ours.dataset, spdl_torch.ImageFolder)
    for (image, _), (expected, _) in zip(ours, reference, strict=True):
        assert (image.int() - expected.int()).abs().max() <= 1


def test_meter_counts_what_is_best_and_among_the_best_five():
    """Means over images, not over batches."""
    meter = _imagenet_figures.Meter(torch.device("cpu"))
    logits = torch.arange(10.0).repeat(4, 1)
    meter.add(logits, torch.tensor([9, 9, 5, 0]), torch.tensor(1.0))
    meter.add(logits[:1], torch.tensor([9]), torch.tensor(6.0))
    figures = meter.figures()
    assert figures == _imagenet_figures.Figures(num_images=5, loss=2.0, acc1=60.0, acc5=80.0)


def test_learning_rate_rises_then_falls_to_zero():
    """A line over the warm-up, half a cosine after it, by steps."""
    options = Namespace(epochs=4, lr_warmup_epochs=1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = _imagenet_model.make_schedule(options, optimizer, steps_per_epoch=5)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:5] == pytest.approx([0.01, 0.208, 0.406, 0.604, 0.802])
    assert rates[5] == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0)


def test_lightning_has_the_figures_of_the_plain_loop(photographs, tmp_path, capsys):
    """The same weights and images."""
    pytest.importorskip("lightning")
    import imagenet_lightning

    run_here(photographs, tmp_path, "--lr", 0.001)
    plain = validation_of(capsys.readouterr().out)
    weights = ("--eval-only", "--weights", tmp_path / "last.pt")
    imagenet_lightning.main(arguments(photographs, tmp_path, *weights))
    printed = capsys.readouterr().out
    assert validation_of(printed) == plain
    assert "images/s after" in printed


def test_lightning_goes_on_after_its_checkpoint(photographs, tmp_path, capsys):
    """Two ranks, then one with --resume; every validation image counts once in both."""
    pytest.importorskip("lightning")
    given = arguments(photographs, tmp_path)
    ranks = ["--devices", 2]
    printed = run_two_ranks("imagenet_lightning.py", *given, *ranks, preload=["lightning"])
    assert validation_of(printed).endswith(f"on {NUM_VALIDATION} images")
    assert (tmp_path / "best.ckpt").is_file()
    assert list(tmp_path.glob("logs/*/metrics.csv"))
    importlib.import_module("imagenet_lightning").main([*given, "--resume", "--epochs", "2"])
    printed = capsys.readouterr().out
    assert "epoch 2/2" in printed
    assert "epoch 1/2" not in printed
    assert validation_of(printed).endswith(f"on {NUM_VALIDATION} images")


def test_batches_are_equal_when_one_import_is_replaced():
    """The newcomer's program says so, and measures three variants, on photographs that it makes."""
    printed = run("replace_dataloader.py", "--smoke", "--images", 16)
    assert "our DataLoader: none" in printed
    rows = re.findall(r"([\d.]+) s +(\d+) +([\d.]+)$", printed, flags=re.M)
    assert len(rows) == 3
    assert rows[0][2] == rows[1][2], "the losses"
    assert "no such folder" in run("replace_dataloader.py", "--data", "no/such", code=2)
