"""Ranks that do not step together: local SGD, DiLoCo, parameter servers."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from shardproof.costs.ddp import Single
from shardproof.costs.layout import layouts
from shardproof.costs.model import Bytes, Flow, Local, NoCostModel, flow, state_bytes
from shardproof.costs.model_facts import ITEMSIZE, TensorFacts


class LocalSGD(Single):
    """Full replication; parameters are averaged in every H-th step, and nothing else is sent."""

    strategy = "local_sgd"
    source = (
        "one all-reduce of the parameters every H steps: Stich, arXiv 1805.09767, algorithm 1; "
        "bytes of an all-reduce: ZeRO (arXiv 1910.02054) section VII-A"
    )
    #: What ``every`` is where the options do not say.
    every = 8
    #: Steps counted before the first one: with 1, ranks meet after step H - 1.
    #     H = 3    steps  0 1 2* 3 4 5*    with 1;   0* 1 2 3* 4 5    with 0 (PostLocalSGD)
    ahead = 1

    def flows(self) -> list[Flow]:
        """2 (N-1) P bytes where ranks meet: one all-reduce a dtype; elsewhere none."""
        facts = self.facts
        if (facts.step + self.ahead) % int(facts.option("every", self.every)):
            return []
        payloads = [flat.padded_bytes() for flat in layouts(facts.trainable, 1)]
        return flow(facts, facts.group(), "all_reduce", payloads)

    def control_limit(self) -> int:
        """Between meetings not a byte of any kind is sent, and a meeting sends no integers."""
        return 0

    def why_not_measured(self) -> str:
        """Which ranks have gradients of a parameter that goes unused no formula says."""
        idle = [t.name for t in self.facts.trainable if not t.in_every_backward]
        why = "is not used in every step, so no formula says which ranks hold its state"
        return f"{idle[0]!r} {why}" if idle else ""

    why_state_is_not_promised = why_not_measured

    def trains(self, rank: int, step: int) -> bool:
        """Whether ``rank`` has data in ``step``: without it there is nothing to update by."""
        return self.facts.micro_batches_of(self.facts.data_coordinate(rank), step) > 0

    def has_trained(self, rank: int, updated: int) -> bool:
        """Whether it had any by step ``updated``."""
        return any(self.trains(rank, step) for step in range(updated + 1))

    def outer(self) -> int:
        """Copies of the parameters that the strategy keeps."""
        return 0

    def gradient_bytes(self, rank: int, step: int) -> int:
        """Of a rank's own use."""
        return super().gradient_bytes(rank, step) if self.trains(rank, step) else 0

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """As one process; what is kept from meeting to meeting counts as optimizer state."""
        own = super().resident(rank, step, updated if self.has_trained(rank, updated) else -1)
        kept = self.outer() * sum(tensor.nbytes for tensor in self.facts.trainable)
        return own | {"optimizer_state": own["optimizer_state"] + kept}

    def local(self, rank: int) -> Local:
        """Whole tensors; state of what this rank uses, or of all where something is kept."""
        held, last = {t.name: t.numel for t in self.held_by(rank)}, self.facts.steps - 1
        own = Local.of(self.facts, held, held if self.has_trained(rank, last) else {})
        gradients = own.gradients if self.trains(rank, last) else {}
        kept = {t.name: t.numel for t in self.facts.trainable}
        return Local(own.parameters, gradients, kept if self.outer() else own.optimizer)


class DiLoCo(LocalSGD):
    """Local SGD with an outer optimizer on where ranks started from."""

    strategy = "diloco"
    source = (
        "one all-reduce of the pseudo-gradient every H steps; the start and the outer momentum are "
        "kept, 8 bytes per parameter in fp32: DiLoCo, arXiv 2311.08105, algorithm 1"
    )

    def outer(self) -> int:
        """The start, and momentum unless it is 0."""
        return 2 if self.facts.option("outer_momentum", 0.9) else 1


class ParameterServer(Single):
    """Each parameter on one server; a worker's step moves them down and its gradients up.

    In what step of its own a server meets a pull or a push follows from the order in which they
    come: there is a formula for orders that repeat, none for those of a script.
    """

    strategy = "parameter_server"
    unmixed = tuple(ITEMSIZE)
    source = (
        "a worker pulls P and pushes G in every step, servers as often as there are workers: Li et "
        "al., OSDI 2014, section 2; each server's message ends with a flag for each of its "
        "parameters and the version"
    )

    @property
    def servers(self) -> int:
        """k: the first ranks."""
        return int(self.facts.option("servers", 1))

    @property
    def workers(self) -> int:
        """All others."""
        return self.facts.world - self.servers

    def owner(self) -> Mapping[str, int]:
        """The server of each trained parameter: the largest first, each to who has least."""
        sizes, names, owner = [0] * self.servers, [0] * self.servers, {}
        # Equal sizes go to the server with fewer names, so that empty tensors are spread, too.
        for tensor in sorted(self.facts.trainable, key=lambda tensor: -tensor.numel):
            least = min(range(self.servers), key=lambda s: (sizes[s], names[s]))
            owner[tensor.name] = least
            sizes[least] += tensor.numel
            names[least] += 1
        return owner

    def lives(self, worker: int, turn: int) -> bool:
        """Whether ``worker`` makes its pull or push number ``turn``."""
        dies: Mapping[str, int] = self.facts.option("dies", {})
        # A worker's turns: 2 s is its pull of step s, 2 s + 1 its push.
        return not dies or worker != dies["worker"] or turn < dies["turns"]

    def states(self, updated: int) -> int:
        """How often a server has optimizer state: once, or for each worker whose push it met."""
        met = {pull for step in range(updated + 1) for pull in self.served(step)}
        workers = {worker for worker, own in met if self.lives(worker, 2 * own + 1)}
        by_worker = self.facts.option("momentum", "shared") == "by_worker"
        return len(workers) if by_worker else min(len(workers), 1)

    def served(self, step: int) -> list[tuple[int, int]]:
        """Worker and step of every pull that a server meets in ``step``; pushes follow pulls.

        :raises NoCostModel: the order follows no formula.
        """
        order = self.facts.option("order", "slow")
        bound, last = int(self.facts.option("max_staleness", 1)), self.workers - 1
        dies = self.facts.option("dies", {})
        if order == "in_turn":
            return [(worker, step) for worker in range(self.workers)]
        if order == "slow" and (not dies or last == 0 or last - (dies["worker"] != last) > 0):
            behind = [(last, step - bound)] if step >= bound else []
            return [(worker, step) for worker in range(last)] + (behind if last else [(0, step)])
        if order == "burst" and not dies:
            if step % (bound + 1) < bound:
                return [(0, step)]
            # Staleness 2: worker 0 is alone in two steps, then each other makes up its three.
            others = range(1, self.workers)
            return [(0, step), *((w, step - bound + n) for w in others for n in range(bound + 1))]
        raise NoCostModel(
            f"no traffic formula for order = {order!r}: updates arrive in no fixed pattern"
        )

    def flows(self) -> list[Flow]:
        """Pulls that servers answer, and pushes of workers: one message each a server."""
        trained, step = self.facts.trainable, self.facts.step
        kinds = {tensor.dtype for tensor in trained}
        if len(kinds) > 1:
            raise NoCostModel(f"no traffic formula: parameters have {len(kinds)} different dtypes")
        item = ITEMSIZE[next(iter(kinds))]
        # A flag for each parameter and a version for each server travel as floats with the values.
        message = item * (sum(t.numel for t in trained) + len(trained) + self.servers)
        met = self.served(step)
        answered = sum(self.lives(worker, 2 * own) for worker, own in met)
        taken = sum(self.lives(worker, 2 * own + 1) for worker, own in met)
        pulled, pushed = (
            sum(self.lives(worker, 2 * step + turn) for worker in range(self.workers))
            for turn in (0, 1)
        )
        sent, received = answered + pushed, taken + pulled
        return [
            Flow(self.facts.group(), "send", Fraction(message * sent), self.servers * sent),
            Flow(self.facts.group(), "recv", Fraction(0), self.servers * received),
        ]

    def control_limit(self) -> int:
        """No integers: versions and flags go with the values."""
        return 0

    def why_not_measured(self) -> str:
        """Which worker used a parameter by then no formula says."""
        idle = [t.name for t in self.facts.trainable if not t.in_every_backward]
        if idle:
            return f"{idle[0]!r} is not always used: the start of its state is unknown"
        if 0 in self.facts.micro_batches:
            return "some ranks have no samples, so no formula says when their state exists"
        try:
            self.states(self.facts.steps - 1)
        except NoCostModel as error:
            return str(error)
        return ""

    why_state_is_not_promised = why_not_measured

    def owned_by(self, rank: int) -> list[TensorFacts]:
        """The parameters that a server owns; the first one has also the untrained ones."""
        owner = self.owner()
        return [t for t in self.facts.parameters if owner.get(t.name, 0) == rank]

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """A server has what it owns and state for it, a worker all parameters and its gradients."""
        is_server = rank < self.servers
        held = self.owned_by(rank) if is_server else self.facts.parameters
        trained = [(t, t.numel) for t in held if t.trainable]
        computes = not is_server and self.lives(rank - self.servers, 0)
        states = self.states(updated) if is_server else 0
        return {
            "parameters": sum(t.nbytes for t in held),
            "masters": 0,
            "gradients": sum(t.nbytes for t, _ in trained) if computes else 0,
            "optimizer_state": state_bytes(self.facts, trained, updated) * states if states else 0,
        }

    def unclassified_limit(self, rank: int, step: int) -> int | None:
        """Servers keep no message once it is applied; workers have not been asked."""
        return 0 if rank < self.servers else None

    def local(self, rank: int) -> Local:
        """Servers show what they own, and keep no gradient; workers show nothing."""
        own = Local.of(self.facts, {t.name: t.numel for t in self.owned_by(rank)})
        return Local(own.parameters, {}, own.optimizer)
