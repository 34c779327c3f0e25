"""Schema classes in Hydra's config store; the node of a class is built when a config first uses it.

`ConfigStore.store` builds a node for every class, which takes 0.2 s at each start of a command.
"""

from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore

from maxhydra.config.option_types import schema_node

PROVIDER = "maxhydra"


class SchemaEntry(ConfigNode):
    """An entry of the config store whose `node` is that of `schema_node`."""

    def __init__(self, name: str, group: str, cls: type):
        self.name, self.group, self.package, self.provider = name, group, None, PROVIDER
        self.schema = cls

    def __getattr__(self, name: str) -> Any:
        if name != "node":
            raise AttributeError(name)
        return schema_node(self.schema)


def store_schemas(schemas: Mapping[str, type]) -> None:
    """Add schema classes to Hydra's config store under names such as `schema/task/inspect`."""
    for path, cls in schemas.items():
        *groups, option = path.split("/")
        folder = ConfigStore.instance().repo
        for group in groups:
            folder = folder.setdefault(group, {})
        folder[f"{option}.yaml"] = SchemaEntry(f"{option}.yaml", "/".join(groups), cls)
