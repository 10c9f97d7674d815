"""Endpoints of other APIs, OpenAI's and Anthropic's, as translations into the same sample jobs.

A request becomes the body that `/api/v1/asample` takes and goes the way every sample goes: the same
checks, queue, fair shares, count of use and sampler. Nothing here touches an engine.
"""
