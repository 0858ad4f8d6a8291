"""Every kind of place that images come from, through real files: which images, classes and splits, what is said."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from tests.test_data import CONFIG, _own_cache, listed  # noqa: F401  fixture
from vit2linear.data import train_batches
from vit2linear.errors import DataError
from vit2linear.images import EXTENSIONS, ImageOptions, ImageSets, open_images
from vit2linear.images.archives import LARGEST, ArchiveStore, Place
from vit2linear.views import eval_view

IGNORE = ImageOptions(ignore_labels=True)
_RNG = np.random.default_rng(0)


def image(kind: str = "png") -> bytes:
    """A small noise image that is like no other."""
    file = io.BytesIO()
    Image.fromarray(_RNG.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(file, kind)
    return file.getvalue()


def class_files(splits: tuple[str, ...] = ("train/", "val/"), count: int = 2) -> dict[str, bytes]:
    return {f"{s}{c}/{i}.png": image() for s in splits for c in ("cat", "dog") for i in range(count)}


def as_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def as_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def as_zip(path: Path, files: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def contents(images: object) -> dict[bytes, str | None]:
    """Every image with the name of its class."""
    found = listed(images)
    rows = [found.read(i) for i in range(found.size)]
    assert len({data for data, _ in rows}) == found.size
    return {data: found.classes[label] if found.classes and label >= 0 else None for data, label in rows}


def everything(sets: ImageSets) -> dict[bytes, str | None]:
    train, validation = contents(sets.train), contents(sets.validation)
    assert not train.keys() & validation.keys()
    return train | validation


MAKE = {"folder": lambda p, f: as_folder(p / "set", f), "tar": lambda p, f: as_tar(p / "set.tar", f)}
MAKE["zip"] = lambda p, f: as_zip(p / "set.zip", f)


@pytest.mark.parametrize("kind", MAKE)
def test_class_folders_wherever_they_lie(kind: str, tmp_path: Path) -> None:
    files = class_files()
    others = {
        "train/cat/notes.txt": b"x",
        "README": b"x",
        "train/.hidden.png": b"x",
        "__MACOSX/train/cat/._0.png": b"x",
    }
    # One folder around everything, as archives often have.
    path = MAKE[kind](tmp_path, {f"mine/{name}": data for name, data in (files | others).items()})
    sets = open_images(str(path))
    for split, images in (("train", sets.train), ("val", sets.validation)):
        wanted = {d: n.split("/")[1] for n, d in files.items() if n.startswith(split)}
        assert contents(images) == wanted and images.name == f"{path} ({split})"
    assert sets.held_out is None and len(sets.notes) == 1
    assert "4 files are ignored" in sets.notes[0] and "README" in sets.notes[0]
    unlabelled = open_images(str(path), IGNORE)
    assert set(contents(unlabelled.train).values()) == {None} and unlabelled.train.classes is None
    where = listed(sets.train).where(0)
    assert "cat/0.png" in where and path.name in where


@pytest.mark.parametrize("kind", MAKE)
def test_every_extension_is_read(kind: str, tmp_path: Path) -> None:
    kinds = {"jpg": "jpeg", "tif": "tiff"}
    files = {
        f"cat/{i}{s.upper() if i % 2 else s}": image(kinds.get(s[1:], s[1:]))
        for s in EXTENSIONS for i in range(2)
    }  # fmt: skip
    sets = open_images(str(MAKE[kind](tmp_path, files)))
    assert everything(sets) == dict.fromkeys(files.values(), "cat") and not sets.notes and sets.held_out
    view = eval_view(CONFIG)
    train = listed(sets.train)
    assert all(view(train.read(i)[0], train.where(i)).shape == (3, 32, 32) for i in range(train.size))


@pytest.mark.parametrize("kind", MAKE)
def test_images_beside_class_folders(kind: str, tmp_path: Path) -> None:
    files = class_files(("",)) | {"stray.png": image()}
    path = str(MAKE[kind](tmp_path, files))
    with pytest.raises(DataError, match=r"holds 1 images beside class folders.*--ignore-labels"):
        open_images(path)
    sets = open_images(path, IGNORE)
    assert everything(sets) == dict.fromkeys(files.values())
    assert "holds images beside folders; all 5 are read, without classes" in sets.notes[0]


def test_archives_give_what_folders_give(tmp_path: Path) -> None:
    files = class_files(("",), 12)
    found = [everything(open_images(str(make(tmp_path, files)))) for make in MAKE.values()]
    assert found[0] == found[1] == found[2]
    # The same images are held out again, by content.
    thresholds = {open_images(str(make(tmp_path, files))).held_out for make in MAKE.values()}
    assert len(thresholds) == 1 and None not in thresholds


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_archives_are_read_by_several_processes(kind: str, tmp_path: Path) -> None:
    images = open_images(str(MAKE[kind](tmp_path, class_files(count=6)))).train
    view = eval_view(CONFIG)
    alone, together = ([x for x, _ in train_batches(images, view, 4, 6, 0, workers)] for workers in (0, 2))
    assert all((a == b).all() for a, b in zip(alone, together, strict=True))


def test_a_tar_file_for_each_class(tmp_path: Path) -> None:
    """Beside each other, and inside one more as ImageNet's."""
    files = {name: {f"{name}_{i}.JPEG": image("jpeg") for i in range(3)} for name in ("n01440764", "n01443537")}
    for name, content in files.items():
        as_tar(tmp_path / "many" / f"{name}.tar", content)
    as_tar(tmp_path / "all.tar", {p.name: p.read_bytes() for p in (tmp_path / "many").iterdir()})
    wanted = {data: name for name, content in files.items() for data in content.values()}
    assert everything(open_images(str(tmp_path / "many"))) == wanted
    assert everything(open_images(str(tmp_path / "all.tar"))) == wanted


def shards(folder: Path, labels: str, count: int = 3) -> dict[str, dict[bytes, str | None]]:
    """train-000.tar to train-002.tar and val-000.tar in webdataset's manner; what they hold."""
    held: dict[str, dict[bytes, str | None]] = {}
    for number, name in enumerate(("train-000", "train-001", "train-002", "val-000")):
        files = {}
        for i in range(count):
            data, label = image(), (number + i) % 3
            files[f"{number}{i}.jpg"] = data
            files[f"{number}{i}.txt"] = b"a caption"
            if labels == "cls":
                files[f"{number}{i}.cls"] = str(label).encode()
            if labels == "json":
                files[f"{number}{i}.json"] = json.dumps({"width": 9, "label": f"class {label}"}).encode()
            name_of = {"cls": str(label), "json": f"class {label}", "none": None}
            held.setdefault(name, {})[data] = name_of[labels]
        as_tar(folder / f"{name}.tar", files)
    return held


@pytest.mark.parametrize("labels", ["cls", "json", "none"])
def test_webdataset_shards(labels: str, tmp_path: Path) -> None:
    held = shards(tmp_path / "shards", labels)
    train = held["train-000"] | held["train-001"] | held["train-002"]
    for path in ("shards", "shards/*.tar", "shards/{train-{000..002},val-000}.tar", "shards/{train,val}-*.tar"):
        if "{train-{" in path:
            continue  # braces in braces are no pattern
        sets = open_images(str(tmp_path / path))
        assert (contents(sets.train), contents(sets.validation)) == (train, held["val-000"])
        assert "12 files are ignored" in sets.notes[0] and ".txt" in sets.notes[0]
    part = open_images(str(tmp_path / "shards/train-{000..001}.tar"))
    assert everything(part) == held["train-000"] | held["train-001"] and part.held_out
    assert everything(open_images(str(tmp_path / "shards/train-002.tar"))) == held["train-002"]
    with pytest.raises(DataError, match=r"there is no file '.*train-003\.tar' of '.*train-\{000\.\.003\}\.tar'"):
        open_images(str(tmp_path / "shards/train-{000..003}.tar"))
    with pytest.raises(DataError, match=r"there is no file '.*absent-\*\.tar'"):
        open_images(str(tmp_path / "shards/absent-*.tar"))


@pytest.mark.parametrize(("label", "text"), [("-3", "run from -3 to 1"), ("9" * 12, "run from 1 to 9999")])
def test_numbers_that_are_no_labels(label: str, text: str, tmp_path: Path) -> None:
    files = {"0.png": image(), "0.cls": b"1", "1.png": image(), "1.cls": label.encode()}
    path = str(as_tar(tmp_path / "x.tar", files))
    with pytest.raises(DataError, match=text):
        open_images(path)
    assert len(everything(open_images(path, IGNORE))) == 2


def test_broken_labels_are_no_labels(tmp_path: Path) -> None:
    files = {f"{i}.png": image() for i in range(4)}
    beside = {"0.json": b"{", "1.json": b"[1]", "2.cls": b" 5\n", "3.json": b'{"label": 5}', "9.json": b"{}"}
    sets = open_images(str(as_tar(tmp_path / "x.tar", files | beside)))
    assert sorted(map(str, everything(sets).values())) == ["5", "5", "None", "None"]


def parquet(path: Path, count: int, label: list[object] | None = None, feature: object = None) -> list[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [image() for _ in range(count)]
    features = {"image": datasets.Image()} | ({"label": feature or datasets.Value("int64")} if label else {})
    rows = {"image": [{"bytes": d, "path": None} for d in data]} | ({"label": label} if label else {})
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(path)
    return data


def test_parquet_files(tmp_path: Path) -> None:
    train = parquet(tmp_path / "t/train-00.parquet", 4, [0, 1, 2, -1])
    val = parquet(tmp_path / "t/val-00.parquet", 2, [1, 0])
    for path in ("t", "t/*.parquet", "t/{train,val}-00.parquet"):
        sets = open_images(str(tmp_path / path))
        # Bare numbers: as many classes as the largest says, in every split.
        assert contents(sets.train) == dict(zip(train, ["0", "1", "2", None], strict=True))
        assert contents(sets.validation) == dict(zip(val, ["1", "0"], strict=True))
        assert sets.train.classes == sets.validation.classes == ("0", "1", "2")
    one = open_images(str(tmp_path / "t/train-00.parquet"))
    assert everything(one).keys() == {*train} and one.held_out
    assert set(everything(open_images(str(tmp_path / "t"), IGNORE)).values()) == {None}


def test_label_columns(tmp_path: Path) -> None:
    names = parquet(tmp_path / "names.parquet", 3, ["dog", "cat", None], datasets.Value("string"))
    assert everything(open_images(str(tmp_path / "names.parquet"))) == dict(
        zip(names, ["dog", "cat", None], strict=True)
    )
    import pyarrow as pa
    import pyarrow.parquet as pq

    # As other programs write them: datasets does not know that these are images.
    data = [image(), image()]
    for column in (data, [{"bytes": d, "path": None} for d in data]):
        pq.write_table(pa.table({"jpg": column, "cls": [1, 0]}), tmp_path / "plain.parquet")
        assert everything(open_images(str(tmp_path / "plain.parquet"))) == dict(zip(data, ["1", "0"], strict=True))
        (tmp_path / "plain.parquet").unlink()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(DataError, match=r"has no image column\. Its columns: text"):
        open_images(str(tmp_path / "text.parquet"))


@pytest.mark.parametrize(("labels", "low", "high"), [([0, 5], 0, 5), ([1, -2], -2, 1)])
def test_labels_out_of_the_range_of_their_classes(labels: list[int], low: int, high: int, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parquet(tmp_path / "x.parquet", 2, [0, 1], datasets.ClassLabel(names=["a", "b", "c"]))
    table = pq.read_table(tmp_path / "x.parquet")
    pq.write_table(table.set_column(1, "label", pa.array(labels)), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=f"x.parquet .train. run from {low} to {high}; allowed are 0 to 2, and -1"):
        open_images(str(tmp_path / "x.parquet"))
    assert len(everything(open_images(str(tmp_path / "x.parquet"), IGNORE))) == 2


def test_saved_sets(tmp_path: Path) -> None:
    data = [image() for _ in range(5)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": d, "path": None} for d in data], "label": [0, 1, 0, 1, 0]}
    table = datasets.Dataset.from_dict(rows, features=features)
    splits = datasets.DatasetDict({"train": table.select([0, 1, 2]), "test": table.select([3, 4])})
    splits.save_to_disk(str(tmp_path / "saved"))
    table.save_to_disk(str(tmp_path / "one"))
    sets = open_images(str(tmp_path / "saved"))
    assert contents(sets.train) == dict(zip(data[:3], ["cat", "dog", "cat"], strict=True))
    assert contents(sets.validation) == dict(zip(data[3:], ["dog", "cat"], strict=True))
    assert len(everything(open_images(str(tmp_path / "one")))) == 5


@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")  # of datasets
@pytest.mark.filterwarnings("ignore:unclosed file")
def test_images_with_a_table_of_metadata(tmp_path: Path) -> None:
    files = {f"images/{i}.png": image() for i in range(3)}
    text = "file_name,label\n" + "".join(f"{name},{i}\n" for i, name in enumerate(files))
    sets = open_images(str(as_folder(tmp_path / "m", files | {"metadata.csv": text.encode()})))
    assert everything(sets) == {data: str(i) for i, data in enumerate(files.values())}


SPLITS = {"train": 4, "val": 3, "extra": 2}


def test_splits_by_name(tmp_path: Path) -> None:
    files = {f"{split}/{i}.png": image() for split, count in SPLITS.items() for i in range(count)}
    path = str(as_folder(tmp_path / "s", files))

    def sizes(split: str | None = None, val_split: str | None = None) -> tuple[int, int, bool]:
        sets = open_images(path, ImageOptions(split, val_split))
        everything(sets)
        return listed(sets.train).size, listed(sets.validation).size, sets.held_out is not None

    # timm would read all three together: the folder beside train and val is no class, and a split by its name only.
    assert sizes() == (4, 3, False)
    assert "not read: 'extra'" in open_images(path).notes[-1]
    assert sizes("extra") == (2, 3, False)
    assert sizes(val_split="extra") == (4, 2, False)
    assert sizes("VAL", "train") == (3, 4, False)
    assert sizes("val") == (2, 1, True)
    with pytest.raises(DataError, match=r"--split: .* has no split 'test'. It has 'extra', 'train', 'val'"):
        sizes("test")
    with pytest.raises(DataError, match="cannot be learned from and judged by its split 'train' alike"):
        sizes("train", "Train")


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_a_split_that_does_not_exist(kind: str, tmp_path: Path) -> None:
    if kind == "parquet":
        parquet(tmp_path / "p/train.parquet", 3)
        path = tmp_path / "p"
    else:
        path = MAKE[kind](tmp_path, {f"train/{i}.png": image() for i in range(3)})
    for options in (ImageOptions("test"), ImageOptions(val_split="test")):
        with pytest.raises(DataError, match=r"split: .* has no split 'test'. It has 'train'\."):
            open_images(str(path), options)
    with pytest.raises(DataError, match="cannot be learned from and judged"):
        open_images(str(path), ImageOptions(val_split="train"))


def test_classes_of_train_and_validation_are_the_same(tmp_path: Path) -> None:
    """A class without validation images shifts no other."""
    files = class_files(("train/",)) | {"val/dog/0.png": image(), "val/eel/0.png": image(), "train/ant/0.png": image()}
    sets = open_images(str(as_folder(tmp_path, files)))
    assert sets.train.classes == sets.validation.classes == ("ant", "cat", "dog", "eel")
    assert everything(sets) == {data: name.split("/")[1] for name, data in files.items()}


def test_two_sets_are_mixed(tmp_path: Path) -> None:
    a = class_files()
    b = {f"{c}/{i}.png": image() for c in ("dog", "eel") for i in range(5)}
    c = {f"{i}.png": image() for i in range(4)}
    paths = (str(as_folder(tmp_path / "a", a)), str(as_tar(tmp_path / "b.tar", b)), str(as_zip(tmp_path / "c.zip", c)))
    sets = open_images(paths)
    wanted = {d: n.split("/")[-2] for n, d in (a | b).items()} | dict.fromkeys(c.values())
    assert everything(sets) == wanted and sets.train.classes == ("cat", "dog", "eel")
    assert (listed(sets.train).size, listed(sets.validation).size) == (4 + 9 + 3, 4 + 1 + 1)
    assert isinstance(sets.held_out, tuple) and [t is None for t in sets.held_out] == [True, False, False]
    assert sets.validation.name == f"{paths[0]} (val) + {paths[1]}, held-out 5% + {paths[2]}, held-out 5%"
    train = listed(sets.train)
    assert [str(tmp_path / "a") in train.where(3), paths[1] in train.where(4), paths[2] in train.where(15)] == [
        True
    ] * 3
    again = open_images(paths, held_out=json.loads(json.dumps(sets.held_out)))
    assert contents(again.validation) == contents(sets.validation)
    with pytest.raises(DataError, match="name the same set twice"):
        open_images((paths[0], paths[0] + "/."))


def test_links_to_folders(tmp_path: Path) -> None:
    files = class_files(("",))
    as_folder(tmp_path / "elsewhere", files)
    root = tmp_path / "root"
    root.mkdir()
    for name in ("cat", "dog"):
        (root / name).symlink_to(tmp_path / "elsewhere" / name)
        # Every folder leads back up twice, which a walk that follows links never comes out of.
        for i in range(2):
            (tmp_path / "elsewhere" / name / f"up{i}").symlink_to(root)
    (root / "itself").symlink_to(root / "itself")
    (root / "gone.png").symlink_to(tmp_path / "nowhere.png")
    sets = open_images(str(root))
    assert everything(sets) == {data: name.split("/")[0] for name, data in files.items()}
    assert "4 folders or links" in sets.notes[0] and "not followed" in sets.notes[0]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_names_that_lead_out_of_an_archive(kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "in" / "evil.png"
    names = ["../evil.png", "../../cat/evil.png", "/etc/evil.png", "cat/../../dog/1.png", str(outside), "a\\b\\2.png"]
    files = {name: image() for name in names}
    path = MAKE[kind](tmp_path / "in", files)
    before = sorted(tmp_path.rglob("*"))
    sets = open_images(str(path), IGNORE)
    assert everything(sets).keys() == {*files.values()}
    assert sorted(tmp_path.rglob("*")) == before, "nothing is unpacked"
    # A file of this machine that a link in an archive names is not read.
    secret = tmp_path / "secret.png"
    secret.write_bytes(image())
    with tarfile.open(tmp_path / "links.tar", "w") as tar:
        for name in ("0.png", "1.png"):
            info = tarfile.TarInfo(name)
            info.size = len(data := image())
            tar.addfile(info, io.BytesIO(data))
        for linked in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            info = tarfile.TarInfo(f"{linked!r}.png")
            info.type, info.linkname = linked, str(secret)
            tar.addfile(info)
    assert secret.read_bytes() not in everything(open_images(str(tmp_path / "links.tar")))


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("x.tar", b"", "cannot be read as an archive"),
        ("x.tar", b"\x1f\x8b" + bytes(600), "cannot be read as an archive.*compressed"),
        ("x.zip", b"PK\x03\x04", "cannot be read as an archive"),
        ("x.tar.gz", b"", "unpack it to .tar"),
        ("x.jpg", b"", "no set of images"),
        ("x.parquet", b"PAR1", "cannot be read by datasets"),
        ("only.tar/notes.txt", b"", "holds no images. 1 file is ignored"),
        ("a/b/c", b"", "holds no images"),
    ],
)
def test_what_is_no_image_set(name: str, data: bytes, text: str, tmp_path: Path) -> None:
    as_folder(tmp_path, {name: data})
    with pytest.raises(DataError, match=text):
        open_images(str(tmp_path / name.split("/")[0]))


@pytest.mark.parametrize(
    "path", ["absent/", "x" * 5000, "a\0b", "", ".", "~/x", "absent.tar", "*", "a**", "*\0", "{a,b}"]
)
def test_paths_that_lead_nowhere(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError):
        open_images(path)


def test_damaged_members_are_errors_of_reading(tmp_path: Path) -> None:
    files = class_files(("",))
    tar, packed = as_tar(tmp_path / "x.tar", files), as_zip(tmp_path / "x.zip", files)
    full = tar.read_bytes()
    tar.write_bytes(full[:1500])
    with pytest.raises(DataError, match=r"x\.tar' cannot be read as an archive: .*cut off"):
        open_images(str(tar))
    data = bytearray(packed.read_bytes())
    data[60:70] = b"0123456789"
    packed.write_bytes(data)
    sets = open_images(str(packed))
    store = ArchiveStore((str(tar), str(packed)))
    for place in (Place(0, "a", 512, 5000), Place(0, "a", 512, LARGEST + 1), Place(1, "cat/0.png"), Place(1, "absent")):
        with pytest.raises(OSError, match=r"cut off|bytes|cannot be unpacked"):
            store.read(place)
    # One image that cannot be read does not stop the choice of those that are held out.
    assert (listed(sets.train).size, listed(sets.validation).size) == (3, 1) and sets.held_out != "f" * 16


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_damaged_archives_are_data_errors(kind: str, tmp_path: Path) -> None:
    labelled = {name.replace(".png", ".cls"): b"1" for name in class_files()}
    full = MAKE[kind](tmp_path, class_files() | labelled).read_bytes()
    rng = np.random.default_rng(0)
    outcomes = set()
    for i in range(150):
        data = bytearray(full)
        # Headers: the first bytes of each block of a tar file, the list at the end of a zip file.
        place = int(rng.integers(len(full) // 512)) * 512 + int(rng.integers(160)) if kind == "tar" else -i - 1
        data[place] = int(rng.integers(256))
        path = tmp_path / f"{i}.{kind}"
        path.write_bytes(data if i % 3 else data[: len(data) * i // 150])
        try:
            sets = open_images(str(path))
            for images in map(listed, (sets.train, sets.validation)):
                for j in range(images.size):
                    images.read(j)
            outcomes.add("read")
        except (DataError, OSError) as error:
            outcomes.add(type(error).__name__)
    assert {"read", "DataError"} <= outcomes


def test_images_beside_tables_are_not_read_in_silence(tmp_path: Path) -> None:
    data = parquet(tmp_path / "train.parquet", 3)
    (tmp_path / "preview.png").write_bytes(image())
    sets = open_images(str(tmp_path))
    assert everything(sets).keys() == {*data} and "the images beside the tables are not read" in sets.notes[0]
