"""The text that the demo model's tokenizer is trained on: an agent's prompt in small, and common words.

It need not be good prose. It decides which byte pairs merge, so that English, code and JSON come to
three or four characters a token. Changing one character changes every token id: raise
`demo.VERSION` with it.
"""

PROSE = """\
You are a coding agent. You help the user with software engineering tasks. Use the instructions below \
and the tools available to you to assist the user.

# Tone and style
You should be concise, direct, and to the point. When you run a non-trivial command, you should explain \
what the command does and why you are running it, to make sure the user understands what you are doing. \
Your output will be displayed on a command line interface. You can use markdown for formatting. Output \
text to communicate with the user; all text you output outside of tool use is displayed to the user. \
Only use tools to complete tasks. If you cannot or will not help the user with something, please do not \
say why or what it could lead to. Please offer helpful alternatives if possible.

# Doing tasks
The user will ask you to perform tasks such as solving bugs, adding new functionality, refactoring code, \
explaining code, and more. For these tasks the following steps are recommended:
- Use the available search tools to understand the codebase and the user's query.
- Implement the solution using all tools available to you.
- Verify the solution if possible with tests. NEVER assume a specific test framework or test script. \
Check the README or search the codebase to find the testing approach.
- When you have completed a task, you MUST run the lint and typecheck commands if they were provided.
NEVER commit changes unless the user explicitly asks you to. It is VERY IMPORTANT to only commit when \
explicitly asked, otherwise the user will feel that you are being too proactive.

IMPORTANT: Assist with defensive security tasks only. Refuse to create, modify, or improve code that may \
be used maliciously. You must never generate or guess URLs for the user unless you are confident that \
the URLs are for helping the user with programming. You may use URLs provided by the user in their \
messages or in local files.

<system-reminder>
As you answer the user's questions, you can use the following context. Codebase and user instructions are \
shown below. Be sure to adhere to these instructions. This context may or may not be relevant to your \
tasks. You should not respond to this context unless it is highly relevant to your task.
</system-reminder>
Here is useful information about the environment you are running in:
<env>
Working directory: /home/user/project
Is directory a git repo: Yes
Platform: linux
OS Version: Linux 6.1.0-generic
Today's date: 2025-11-21
</env>
gitStatus: This is the git status at the start of the conversation. Note that this status is a snapshot \
in time, and will not update during the conversation.
Current branch: main
Status:
 M src/main.py
?? tests/test_main.py
Recent commits:
3f35203 Add the first version of the parser
a81c9de Fix the error when the file does not exist

# Tools
You may call one or more functions to assist with the user query.
You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "Read", "description": "Reads a file from the local \
filesystem. You can access any file directly by using this tool. The file_path parameter must be an \
absolute path, not a relative path. By default, it reads up to 2000 lines starting from the beginning of \
the file.", "parameters": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", \
"properties": {"file_path": {"type": "string", "description": "The absolute path to the file to read"}, \
"offset": {"type": "number", "description": "The line number to start reading from. Only provide if the \
file is too large to read at once"}, "limit": {"type": "integer", "description": "The number of lines to \
read.", "minimum": 1, "default": 2000}}, "required": ["file_path"], "additionalProperties": false}}}
{"type": "function", "function": {"name": "Bash", "description": "Executes a given bash command in a \
persistent shell session with optional timeout, ensuring proper handling and security measures.", \
"parameters": {"type": "object", "properties": {"command": {"type": "string", "description": "The command \
to execute"}, "timeout": {"type": "number", "description": "Optional timeout in milliseconds (max \
600000)"}, "description": {"type": "string"}, "run_in_background": {"type": "boolean", "description": \
"Set to true to run this command in the background."}}, "required": ["command"], \
"additionalProperties": false}}}
{"type": "function", "function": {"name": "Edit", "description": "Performs exact string replacements in \
files.", "parameters": {"type": "object", "properties": {"file_path": {"type": "string"}, "old_string": \
{"type": "string", "description": "The text to replace"}, "new_string": {"type": "string"}, \
"replace_all": {"type": "boolean", "default": false}, "items": {"type": "array", "items": {"type": \
"string", "enum": ["pending", "in_progress", "completed"]}}}, "required": ["file_path", "old_string", \
"new_string"]}}}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
I'll read the file first, then run the tests. Let me check what the error is.
<tool_call>
{"name": "Read", "arguments": {"file_path": "/home/user/project/src/main.py"}}
</tool_call>
<tool_response>
     1→from __future__ import annotations
     2→
     3→import asyncio
     4→import json
     5→import os
     6→from dataclasses import dataclass, field
     7→from pathlib import Path
     8→
     9→
    10→@dataclass(frozen=True)
    11→class Config:
    12→    name: str = "default"
    13→    path: Path | None = None
    14→    values: dict[str, int] = field(default_factory=dict)
    15→
    16→    def load(self, path: str) -> list[str]:
    17→        with open(path, encoding="utf-8") as file:
    18→            data = json.load(file)
    19→        if not data:
    20→            raise ValueError(f"no data in {path}")
    21→        for key, value in data.items():
    22→            if key not in self.values:
    23→                continue
    24→            self.values[key] = int(value)
    25→        return [line.strip() for line in data if line is not None]
</tool_response>
<tool_response>
============================= test session starts ==============================
collected 12 items

tests/test_main.py ......F.....                                          [100%]

=================================== FAILURES ===================================
>       assert result == expected
E       AssertionError: assert 1 == 2
Traceback (most recent call last):
  File "/home/user/project/src/main.py", line 42, in <module>
    main(sys.argv[1:])
TypeError: unsupported operand type(s) for +: 'int' and 'str'
========================= 1 failed, 11 passed in 0.34s =========================
</tool_response>
total 84
drwxr-xr-x 2 root root  4096 Nov 21 05:30 .
-rw-r--r-- 1 root root 12473 Nov 21 05:30 README.md
-rw-r--r-- 1 root root  2425 Nov 21 05:30 setup.py
diff --git a/src/main.py b/src/main.py
--- a/src/main.py
+++ b/src/main.py
@@ -1,7 +1,7 @@
 function add(left, right) {
-  return left - right;
+  return left + right;
 }
export const handler = async (event) => { const { id, name } = event; await store.set(id, name); };
Okay, the user wants me to fix the failing test. Let me think about what could be wrong. The function \
returns an int, but the caller passes a str. I need to convert the value first. Wait, I should check \
whether other places use this function. So the answer is: it should convert the value before it adds.
The test passes now. I changed one line in `src/main.py`, and all 12 tests pass.
1. First, read the file.
2. Then, make the change.
3. Finally, run the tests again: `python -m pytest -q tests/`
See https://github.com/example/project/blob/main/docs/index.html for more information.
"""

WORDS = """\
the of and to in a is that for it as was with be by on not he this are at from or have an they which one \
you were all her she there would their we him been has when who will no more if out so up said what its \
about than into them can only other time new some could these two may first then do any like my now over \
such our man me even most made after also well did many before must years back through much where your \
way down should because long each just state those people too how little good world make very year still \
see own work between both under never same another know while last might us great old off come since go \
against came right used take three himself few house use during without again place around however home \
small found thought went say part once general high upon school every does got united left number course \
war until always away something fact though water less public put think almost hand enough far took head \
yet government system better set told nothing night end why called find going look asked later knew next \
second point let given already order group side best program thing city want problem possible name case \
need within change day help line move turn start show hear play run write read open close stop follow \
create speak allow add spend grow walk win offer remember love consider appear buy wait serve die send \
expect build stay fall cut reach kill remain suggest raise pass sell require report decide pull return \
explain hope develop carry break receive agree support hit produce eat cover catch draw choose cause \
agent assistant user model token prompt message content context cache memory block prefix session tool \
function argument parameter property object array string integer number boolean null true false default \
type value key name path file folder directory command output input error warning result response request \
server client header body stream event status code text json schema format version config option flag \
class method module package import export variable constant field list dictionary tuple queue stack tree \
node edge graph table row column index query database record update delete insert select filter sort \
search match pattern regex replace split join parse render template encode decode encrypt hash digest \
thread process task async await lock signal timeout retry schedule worker engine daemon socket port host \
address network local remote proxy token secret password key login account permission policy security \
test assert expected actual failure success passed failed skipped fixture mock coverage benchmark profile \
branch commit merge rebase push pull clone repository checkout diff patch release build deploy install \
python javascript typescript rust linux windows macos bash shell script docker container image volume \
description information instruction documentation example reference specification implementation \
application environment development configuration authentication connection transaction operation \
execution compilation generation validation verification optimization performance architecture interface \
component element attribute document section paragraph sentence character symbol letter digit line page \
available necessary specific different important several various similar common current previous existing \
following relevant complete incomplete correct incorrect valid invalid empty missing required optional \
additional maximum minimum average total absolute relative background foreground parallel sequence \
usually often sometimes rarely never probably perhaps certainly simply directly exactly immediately \
explicitly automatically carefully quickly slowly completely especially particularly currently finally \
understand recommend provide include contain continue complete perform execute handle manage ensure \
prevent avoid ignore accept reject resolve reduce increase improve modify refactor rename remove restore \
whether either neither instead otherwise therefore because although unless except rather quite really \
question answer reason example idea issue feature bug fix solution approach design plan goal step detail \
today tomorrow yesterday morning evening week month hour minute second January February March April \
August September October November December Monday Tuesday Wednesday Thursday Friday Saturday Sunday \
red green blue black white light dark large small short long fast slow early late near far young simple \
complex hard easy strong weak heavy full half whole single double free busy ready sure clear safe wrong \
mother father child friend teacher student doctor company market price money business service product \
country river mountain forest ocean island garden street building window door kitchen table chair book \
story music picture movie game sport food bread coffee water fire earth animal bird fish horse tree flower
"""


ENDINGS = ("s", "ed", "ing", "er", "ly", "able", "ation")


def syllables() -> list[str]:
    """Consonant-vowel pairs and a closing consonant: a word nobody has seen still costs two or three
    characters a token instead of one."""
    onsets, vowels = "bcdfghjklmnprstvwz", "aeiou"
    return [c + v + end for c in onsets for v in vowels for end in ("", "n", "r", "s", "t")]
