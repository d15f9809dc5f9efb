"""Ledgers of ranks from their Flight Recorder dumps, so that `diagnose` explains these, too; and dumps from ledgers.

A dump knows what its rank issued, and of each entry the sizes, the call site and whether it had completed. It knows no
exceptions, no ends, no strides, no roots, no reduce ops, no steps and no decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from pathlib import Path

import torch

from tpbed.harness.diagnose import TRANSPORT, diagnose
from tpbed.harness.findings import Finding, name_ranks
from tpbed.harness.flight_recorder import (
    DEFAULT_GROUP,
    UNDESCRIBED,
    VERSION,
    FlightDump,
    FlightEntry,
    FlightGroup,
    Frame,
)
from tpbed.tp.blackbox import frame_text
from tpbed.tp.ledger import WORLD, CollectiveRecord, Ledger, MessageRecord, State
from tpbed.tp.world import Liveness

