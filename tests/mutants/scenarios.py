"""What must hold against each kind of fault that users of such servers have reported, a sentence each.

A: aborts and leaks. B: wrong output. C: what the API means. D: deaths and pressure. E: topology and operations.
"""

from __future__ import annotations

SCENARIOS = {
    "A1": "When decode ends a hand-off, prefill hears of it within a lease and frees its blocks.",
    "A2": "Whatever decode refuses, at whatever step, leaves no block on prefill.",
    "A3": "An abort may race the end of prefill: nobody stumbles over a request that is gone.",
    "A4": "To end what is unknown, or what has not begun, is no error.",
    "A6": "Every lease ends by itself, whoever else renews.",
    "A8": "A request can be aborted between its transfer and its batch, and by no other's abort.",
    "A10": "A hand-off that fails gives back all that it held: its grant, its credits, its place in the queue.",
    "A11": "Leases end on a timer: a full pool recovers though nobody calls.",
    "A12": "A client that goes away before token 1 stops prefill, and decode's room is free at once.",
    "A13": "A client that goes away between the two legs frees both.",
    "B1": "Blocks with a read or write under way are given to nobody until it is over.",
    "B2": "A grant that has ended, or is another incarnation's, lets nothing in.",
    "B6": "KV of another dtype is cast by its sender; what cannot be converted does not move.",
    "B7": "Decode makes no token from part of a prompt's KV.",
    "B8": "KV is used and shared only when every byte of it has come and is right.",
    "B9": "KV goes by token position, however much of the prefix each side knows.",
    "B10": "Cached KV is found only by what depends on all that it was computed from.",
    "C1": "An answer that token 1 ends goes no further.",
    "C2": "Whatever ends an answer ends it at token 1 too.",
    "C3": "All choices of a request share one hand-off, and each ends.",
    "C4": "Prompt logprobs are prefill's to compute, whatever is cached.",
    "C6": "Each token comes to the client once, and none is missed.",
    "C8": "Usage counts token 1 and the cached tokens.",
    "C10": "What failed is an error, never a 200 with an odd finish_reason.",
    "D1": "Another worker at a known address is a new one, everywhere at once; without decode workers prefill decodes.",
    "D3": "When prefill dies in a hand-off, or is not answered, decode's room is free again at once.",
    "D4": "When prefill fails, decode frees its room at once.",
    "D5": "One lost frame ends the hand-off within a deadline: nobody counts towards what never comes.",
    "D7": "A handed-over request that is preempted is computed here.",
    "D8": "Preemption takes the latest arrival, and comes to an end.",
    "D9": "The time in prefill's queue is not decode's to limit.",
    "D10": "Hand-offs in flight have a room of their own, which is a setting.",
    "E1": "Whatever the number of ranks on either side, each head of KV comes once and to its place.",
    "E2": "What cannot be divided or converted is refused at start-up or at connect, with the numbers.",
    "E3": "Two workers never share a port: the second says which is taken.",
    "E4": "A worker that has not said who it is, or does not know its address yet, counts as not there.",
    "E5": "Ready follows the workers as they come and go.",
    "E6": "A transport that is asked for by name is used, or refused in words.",
}
