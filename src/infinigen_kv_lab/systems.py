"""What the laboratory registers with the engine: one line for each policy and each home.

The package's entry points name these sequences.
"""

from infinigen_kv.policies.entry import PolicyEntry
from infinigen_kv.storage.home_kinds.base import HomeKind
from infinigen_kv_lab.baselines.h2o import H2O
from infinigen_kv_lab.baselines.oracle import ORACLE
from infinigen_kv_lab.baselines.quest import QUEST
from infinigen_kv_lab.baselines.scissorhands import SCISSORHANDS
from infinigen_kv_lab.baselines.streaming_llm import STREAMING_LLM
from infinigen_kv_lab.paging.home import PagedKind
from infinigen_kv_lab.paging.policies import PAGING, PAGING_H2O

POLICIES: tuple[PolicyEntry, ...] = (
    H2O,
    SCISSORHANDS,
    STREAMING_LLM,
    QUEST,
    PAGING,
    PAGING_H2O,
    ORACLE,
)
HOMES: tuple[HomeKind, ...] = (PagedKind(),)
