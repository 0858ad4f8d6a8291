"""Layouts other than the two common ones, from the Hub: what is fetched, and without a connection afterwards."""

from __future__ import annotations

import io
import json

import pytest
import timm
import torch

from tests.conftest import write_images
from tests.hub_user import User

WEIGHTS, TOWER = "somebody/weights", "somebody/tower"
SMALL = "--distill-steps 0 --data IMAGES --device cpu --workers 0 -b 4 --num-samples 4"


def stored(weights: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(weights, file)
    return file.getvalue()


@pytest.mark.slow
def test_weights_alone_and_open_clip(user: User) -> None:
    vit = timm.create_model("test_vit", img_size=160).state_dict()
    user.hub.add_repo(WEIGHTS, {"README.md": b"---\nlicense: mit\n---\n", "vit_pretrain.pth": stored(vit)})
    tower = timm.create_model("test_vit", img_size=32, num_classes=7).state_dict()
    vision = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": None, "image_size": 32}
    config = {"model_cfg": {"embed_dim": 7, "vision_cfg": vision}, "preprocess_cfg": {}}
    files = {
        "open_clip_config.json": json.dumps(config).encode(),
        "open_clip_pytorch_model.bin": stored({f"visual.trunk.{k}": v for k, v in tower.items()}),
    }
    user.hub.add_repo(TOWER, files)
    write_images(user.folder / "IMAGES", 6, seed=3)

    for offline in ("", "--offline"):
        asked = len(user.hub.requests)
        user.run(f"vit2linear convert {TOWER} --dry-run --data IMAGES {offline}")
        assert user.fetched(TOWER) == {"config.json", "open_clip_config.json"}, "a dry run fetches no weights"
        user.run(f"vit2linear convert {WEIGHTS} --arch test_vit {SMALL} -o out{offline} {offline}")
        report = json.loads((user.folder / f"out{offline}" / "report.json").read_text())
        assert report["source"]["repo"] == WEIGHTS and report["source"]["commit"] == user.hub.commit(WEIGHTS)
    user.run(f"vit2linear inspect {WEIGHTS} --arch test_vit --offline")
    user.run("vit2linear eval out --data IMAGES --workers 0 --device cpu --offline")
    user.run("vit2linear push out me/out --dry-run --offline")
    done = user.run(f"vit2linear convert {WEIGHTS} --arch test_vit -o other --data me/images --offline", code=3)
    assert "not in the local cache, and HF_HUB_OFFLINE or --offline forbids" in done.stderr
    assert len(user.hub.requests) == asked, "offline, nobody is asked"
