"""Processes that compute together: the only folder that imports ``torch.distributed``.

A team is processes with copies of the model, or one process alone (``Team``), or processes with
shards of the model and perhaps copies of these (``ShardedTeam``). Callers need not ask which it is.
``Shards`` are the parameters that are sharded, perhaps none: they gather a parameter when a module
reads it, and add its gradient to a sum as soon as it is there.

| file | has |
|---|---|
| ``team.py`` | the two kinds of teams, and ``team_of`` |
| ``shards.py`` | parameters, and rounds in which processes request what they need of others |
| ``fully_shard.py`` | what of ``fully_shard`` is refused, and the casts of its mixed precision |
| ``scattering.py`` | derivatives with respect to gathered parameters |
| ``layout.py`` | which part of a parameter, and of its vectors, a process has |
| ``messages.py`` | tensors and objects, and errors that are raised in all |

Calls may be nested as follows.

1. A product is ``summing`` or ``sharing``, in it ``task``, in it the pass over the data. There is
   one ``sharing`` or ``summing`` at a time.
2. In a pass over the data, processes are not in step: they have other numbers of batches. They call
   nothing of a team there but ``sending``. With shards, they serve each other's requests until all
   are done, at the end of the innermost ``raise_on_all_ranks``. A batch is taken from
   ``Shards.each``, so that processes know when they may follow a schedule.
3. ``raise_on_all_ranks`` and ``task`` may stand in each other where all processes enter them, in
   the same order. Where that is not known, since a method may run in a pass of its caller, stands
   ``raise_once``, and ``in_step`` is the process alone.
4. ``sending`` may stand anywhere: an error is sent once.
"""
