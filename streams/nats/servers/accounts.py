"""The part of a nats-server's configuration that names its users and accounts.

All parts of a deployment share one account, which has JetStream. A tenant may have an account of its own: what the
first one exports to it is then all that the two share, whatever its users may do, as subjects of an account mean
nothing in another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...permissions import Permissions
from ...topology import PRIORITIES, Subjects

DEPLOYMENT = "PENSTOCK"  # the account of the parts


class User(NamedTuple):
    """`key` is the public one of its nkey. With `answers` it may publish answers to what it is asked."""

    name: str
    key: str
    permissions: Permissions
    answers: bool = False


class TenantAccount(NamedTuple):
    """An account of a tenant's own."""

    tenant: str
    users: tuple[User, ...]

    @property
    def name(self) -> str:
        return f"TENANT_{self.tenant}"


def configuration(root: str, users: Sequence[User], tenants: Sequence[TenantAccount] = ()) -> str:
    """The text to be included by each server; `users` are those of the deployment in the namespace `root`."""
    shared = {each.name: _shared(root, each.tenant) for each in tenants}
    exports = [
        f"{{ {kind}: {json.dumps(subject)}, accounts: [{name}] }}"
        for name, subjects in shared.items()
        for subject, kind in subjects.items()
    ]
    lines = [
        "accounts {",
        f"  {DEPLOYMENT} {{",
        "    jetstream: enabled",
        *_users(users),
        *_list("exports", exports),
        "  }",
    ]
    for each in tenants:
        imports = [
            f"{{ {kind}: {{ account: {DEPLOYMENT}, subject: {json.dumps(subject)} }} }}"
            for subject, kind in shared[each.name].items()
        ]
        lines += [f"  {each.name} {{", *_users(each.users), *_list("imports", imports), "  }"]
    return "\n".join([*lines, "}"]) + "\n"


def _shared(root: str, tenant: str) -> Mapping[str, str]:
    """The subjects that a tenant shares with the deployment: what it publishes is a service, what it hears a stream."""
    subjects = Subjects(root)
    publishes = [subjects.jobs(priority, tenant) for priority in PRIORITIES]
    publishes += [subjects.cancel_of(tenant), subjects.replay_of(tenant)]
    return {**dict.fromkeys(publishes, "service"), subjects.events_to(tenant): "stream"}


def _users(users: Sequence[User]) -> list[str]:
    blocks = []
    for user in users:
        allowed = [
            f"publish: {json.dumps(user.permissions.publish)}",
            f"subscribe: {json.dumps(user.permissions.subscribe)}",
        ]
        allowed += ["allow_responses: true"] if user.answers else []
        blocks.append(f"{{ nkey: {user.key}, permissions: {{ {', '.join(allowed)} }} }}  # {user.name}")
    return _list("users", blocks)


def _list(name: str, entries: Sequence[str]) -> list[str]:
    return [f"    {name}: [", *(f"      {entry}" for entry in entries), "    ]"] if entries else []
