"""The diagnosis over training: our logger, and the callback for transformers' Trainer."""

import json
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from affdiv_zoo.diagnostics import DivergenceLogger, DivergenceReport


def train(logger: DivergenceLogger | None, steps: int = 7) -> list[torch.Tensor]:
    """A few updates with everything that a careless diagnosis would disturb; returns the weights and statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = torch.randn(10, 6), torch.randint(3, (10,))
        if logger is not None:
            logger.on_step(model, x, y, step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if logger is not None and step == 3:
            logger.on_step(model, x, y, 3)  # between backward and update: the gradients stay
        optimizer.step()
        optimizer.zero_grad()
    return [t.clone() for t in model.state_dict().values()]


def test_training_is_not_changed_by_it(tmp_path: Path) -> None:
    logger = DivergenceLogger(every=3, samples=4)
    assert all(torch.equal(a, b) for a, b in zip(train(None), train(logger), strict=True))
    assert logger.steps == [0, 3, 3, 6] and all(r.batch_size == 4 and r.training for r in logger.reports)
    spreads = [r["0"].spread for r in logger.reports]
    assert len(set(spreads)) == 3  # other samples each time

    logger.save(tmp_path / "a.json")
    other = DivergenceLogger(every=3)
    other.load_state_dict(json.loads((tmp_path / "a.json").read_text()))
    assert other.steps == logger.steps and other.reports == logger.reports
    other.plot(tmp_path / "a.png", "title")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_diverged_training_is_passed_over() -> None:
    logger = DivergenceLogger(every=1)
    model = nn.Linear(3, 2)
    assert logger.on_step(model, torch.full((2, 3), torch.nan), torch.tensor([0, 1]), 0) is None
    assert logger.reports == []
    with pytest.raises(ValueError, match="every=0"):
        DivergenceLogger(every=0)
    with pytest.raises(ValueError, match="no reports yet"):
        logger.plot("never.png")
    assert not Path("never.png").exists()


def test_corrected_layers_stay_at_their_constant_through_training() -> None:
    torch.manual_seed(0)
    model = timm.create_model("mlp_cifar_affine", depth=2, width=8, scale="l2")
    logger = DivergenceLogger(every=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(5):
        x, y = (step + 1) * torch.randn(6, 3, 32, 32), torch.randint(10, (6,))
        logger.on_step(model, x, y, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [r.summary()["divergence"] for r in logger.reports] == pytest.approx([1.0] * 3, rel=1e-5)


class Pictures(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict:
        # Augmented at random, from the global state: the callback must not move it.
        noise = torch.rand(3, 16, 16)
        return {"pixel_values": noise + i % 3, "labels": i % 3}


@pytest.mark.parametrize("through_trainer", [False, True])
def test_transformers_trainer(through_trainer: bool, tmp_path: Path) -> None:
    import transformers

    from affdiv_zoo.diagnostics.trainer import DivergenceCallback

    def run(folder: Path, watched: bool) -> tuple[dict, "transformers.Trainer"]:
        torch.manual_seed(0)
        config = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16,
            patch_size=8, num_labels=3, hidden_dropout_prob=0.1,
        )  # fmt: skip
        model = transformers.ViTForImageClassification(config)
        args = transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=4, max_steps=6, logging_steps=2, save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, args, train_dataset=Pictures())
        if watched:
            callback = DivergenceCallback(every=3, samples=5, trainer=trainer if through_trainer else None)
            trainer.add_callback(callback)
        trainer.train()
        return model.state_dict(), trainer

    plain, _ = run(tmp_path / "plain", False)
    watched, trainer = run(tmp_path / "watched", True)
    assert all(torch.equal(plain[k], watched[k]) for k in plain)
    rows = [row for row in trainer.state.log_history if "divergence/spread" in row]
    assert [row["step"] for row in rows] == [0, 3, 6] and all(row["divergence/spread"] > 0 for row in rows)
    state = json.loads((tmp_path / "watched" / "divergence.json").read_text())
    assert state["steps"] == [0, 3, 6]
    report = DivergenceReport.from_dict(state["reports"][0])
    assert report.batch_size == 5 and report["vit.layers.0.attention.logits"].rows == 5 * 2 * 5 * 5
    assert (tmp_path / "watched" / "divergence.png").read_bytes()[:4] == b"\x89PNG"
