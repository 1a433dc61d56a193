"""A dataset with a row that the model rejects, by verl's hook `data.custom_cls`: the rank with the row raises."""

from __future__ import annotations

from typing import Any

import torch
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

STEP, BATCH = 2, 8
BEYOND = 9999


class BadRow(MultiTurnSFTDataset):
    """verl's data set, with a token outside of the vocabulary in the first row of step 2."""

    def __getitem__(self, item: int) -> Any:
        row = super().__getitem__(item)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        if item == int(order[BATCH * (STEP - 1)]):
            row["input_ids"][3] = BEYOND
        return row
