"""The tool loops of client libraries, each in whole: a call of a tool, its result, and the final text.

Libraries that are not installed are skipped:
pip install openai-agents langchain-openai pydantic-ai-slim[openai] instructor.
"""

import asyncio

import pytest

from tests.xserver.scripted import TEXT

CITIES: list[str] = []


def get_weather(city: str) -> str:
    """Weather of a city."""
    CITIES.append(city)
    return "sunny"


@pytest.fixture(autouse=True)
def no_cities(monkeypatch):
    """Without calls so far; libraries send nothing to their makers."""
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    CITIES.clear()


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents(scripted, api, streamed):
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0)
    kinds = {"responses": agents.OpenAIResponsesModel, "chat_completions": agents.OpenAIChatCompletionsModel}
    model = kinds[api](model="scripted", openai_client=client)
    agent = agents.Agent("weather", instructions="Be kind.", model=model, tools=[agents.function_tool(get_weather)])

    async def run():
        if not streamed:
            return (await agents.Runner.run(agent, "How is the weather in Rome?")).final_output
        result = agents.Runner.run_streamed(agent, "How is the weather in Rome?")
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(run()) == TEXT and CITIES == ["Rome"]


def test_langchain(scripted):
    chat_openai = pytest.importorskip("langchain_openai").ChatOpenAI
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    weather = tool(get_weather)
    model = chat_openai(model="scripted", base_url=scripted.url + "/v1", api_key="none", max_retries=0)
    bound = model.bind_tools([weather])
    talk = [HumanMessage("How is the weather in Rome?")]
    called = bound.invoke(talk)
    (call,) = called.tool_calls
    talk += [called, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert bound.invoke(talk).content == TEXT and CITIES == ["Rome"]
    total = None
    for chunk in bound.stream(talk[:1]):
        total = chunk if total is None else total + chunk
    assert total.tool_calls[0]["args"] == {"city": "Rome"}


@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(scripted, api):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=scripted.url + "/v1", api_key="none")
    agent = pydantic_ai.Agent(getattr(models, api)("scripted", provider=provider), tools=[get_weather])
    assert agent.run_sync("How is the weather in Rome?").output == TEXT and CITIES == ["Rome"]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(unscripted, mode):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    from typing import Literal

    from pydantic import BaseModel

    class Side(BaseModel):
        side: Literal["left", "right"]

    raw = openai.OpenAI(base_url=unscripted.url + "/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(raw, mode=getattr(instructor.Mode, mode))
    ask = [{"role": "user", "content": "Which side?"}]
    answer = client.chat.completions.create(model="tiny", messages=ask, response_model=Side, max_tokens=200)
    assert answer.side in ("left", "right")


def test_llama_index(scripted):
    like = pytest.importorskip("llama_index.llms.openai_like").OpenAILike
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.tools import FunctionTool

    llm = like(
        model="scripted",
        api_base=scripted.url + "/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(get_weather)], llm=llm, system_prompt="Be kind.")

    async def run():
        return str(await agent.run("How is the weather in Rome?"))

    assert asyncio.run(run()) == TEXT and CITIES == ["Rome"]
