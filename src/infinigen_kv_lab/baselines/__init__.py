"""The policies that InfiniGen is compared with, one file each.

`ENTRIES` is what the package's entry point names: one line here registers a policy.
"""

from infinigen_kv.policies.entry import PolicyEntry
from infinigen_kv_lab.baselines.h2o import H2O
from infinigen_kv_lab.baselines.oracle import ORACLE
from infinigen_kv_lab.baselines.quest import QUEST
from infinigen_kv_lab.baselines.scissorhands import SCISSORHANDS
from infinigen_kv_lab.baselines.streaming_llm import STREAMING_LLM
from infinigen_kv_lab.paging.policies import PAGING, PAGING_H2O

ENTRIES: tuple[PolicyEntry, ...] = (
    H2O,
    SCISSORHANDS,
    STREAMING_LLM,
    QUEST,
    PAGING,
    PAGING_H2O,
    ORACLE,
)
