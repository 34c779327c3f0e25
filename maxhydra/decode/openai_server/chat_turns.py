"""Parsers of the assistant turns of chat requests, in the format of the model's chat template."""

from collections.abc import Sequence

from maxhydra.data.tool_calls import format_of
from maxhydra.data.turn_parser import TurnParser, has_reasoning
from maxhydra.decode.openai_server.request_schema import CompletionRequest
from maxhydra.decode.sampling_params import PromptEncoder

# Tokens at the end of a prompt that may open the model's reasoning.
PROMPT_TOKENS = 16


class ChatTurns:
    """Knows in which format the model writes reasoning and tool calls."""

    def __init__(self, prompts: PromptEncoder):
        self._prompts = prompts
        template = prompts.tokenizer.chat_template or ""
        self._format, self._has_reasoning = format_of(template), has_reasoning(template)

    def has_parts(self, request: CompletionRequest) -> bool:
        """Whether turns may have other parts than content."""
        return request.is_chat and (self._has_reasoning or bool(request.tools))

    def parsers(self, request: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[TurnParser]:
        """Return a parser for each choice; none if all of the text is content."""
        if not self.has_parts(request):
            return []
        return [self._parser(request, prompts[0]) for _ in range(request.samples)]

    def _parser(self, request: CompletionRequest, prompt: Sequence[int]) -> TurnParser:
        if request.is_call_required:
            # The grammar makes a list of calls, which only lacks the mark of that format.
            parser = TurnParser("bracket", has_tools=True)
            parser.add("[TOOL_CALLS]")
            return parser
        end = self._prompts.text_with_names(prompt[-PROMPT_TOKENS:])
        return TurnParser(self._format, has_tools=bool(request.tools), prompt_end=end)
