package copilot

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// hdlLog is a logger's output that may be read while it is written.
type hdlLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *hdlLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *hdlLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *hdlLog) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// hdlJSON returns raw with its members in order.
func hdlJSON(t testing.TB, raw []byte) string {
	t.Helper()
	var v any
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("%v in %q", err, raw)
	}
	b, _ := json.Marshal(v)
	return string(b)
}

// hdlOutcome is the answer to a direct request in one line.
func hdlOutcome(t testing.TB, m peerMessage) string {
	t.Helper()
	if m.Error != nil {
		return fmt.Sprintf("error %d %s%s", m.Error.Code, m.Error.Message, m.Error.Data)
	}
	return hdlJSON(t, m.Result)
}

// hdlStops are the ways in which a handler gives no result.
func hdlStops() map[string]func() error {
	return map[string]func() error{
		"error":    func() error { return errors.New("boom") },
		"panic":    func() error { panic("bang") },
		"panicErr": func() error { panic(errors.New("bang")) },
		"nilMap":   func() error { var m map[string]int; m["x"] = 1; return nil },
		"goexit":   func() error { runtime.Goexit(); return nil },
	}
}

// TestDirectRequests asks each question that comes as a request, with all that a host may do about it.
func TestDirectRequests(t *testing.T) {
	leakCheck(t)
	const section = `{"sections":{"tone":{"content":"polite"},"identity":{"content":"bot"}}}`
	const deny = `{"output":{"permissionDecision":"deny","permissionDecisionReason":%q}}`
	type tc struct {
		name, method, params, want string
		cfg                        SessionConfig
	}
	userInput := func(f func() (UserInputResponse, error)) SessionConfig {
		return SessionConfig{OnUserInput: func(context.Context, UserInputRequest) (UserInputResponse, error) { return f() }}
	}
	plan := func(f func() (ExitPlanModeResult, error)) SessionConfig {
		return SessionConfig{OnExitPlanMode: func(context.Context, ExitPlanModeRequest) (ExitPlanModeResult, error) { return f() }}
	}
	mode := func(f func() (AutoModeSwitchResponse, error)) SessionConfig {
		return SessionConfig{OnAutoModeSwitch: func(context.Context, AutoModeSwitchRequest) (AutoModeSwitchResponse, error) { return f() }}
	}
	hook := func(f func() (any, error)) SessionConfig {
		return SessionConfig{OnHook: func(context.Context, HookCall) (any, error) { return f() }}
	}
	transform := func(f func() (string, error)) SessionConfig {
		return SessionConfig{Transforms: map[string]func(context.Context, string) (string, error){
			"tone": func(context.Context, string) (string, error) { return f() }}}
	}
	cases := []tc{
		{"no handler", "userInput.request", `{"question":"q"}`, `{"noResponse":true}`, SessionConfig{}},
		{"freeform", "userInput.request", `{"question":"q","choices":null}`, `{"answer":"a","wasFreeform":true}`,
			userInput(func() (UserInputResponse, error) { return UserInputResponse{Answer: "a"}, nil })},
		{"choice", "userInput.request", `{"question":"q","choices":["a","b"]}`, `{"answer":"a","wasFreeform":false}`,
			userInput(func() (UserInputResponse, error) { return UserInputResponse{Answer: "a"}, nil })},
		{"no question", "userInput.request", `{}`, `error -32602 params: question is missing`,
			userInput(func() (UserInputResponse, error) { panic("must not be asked") })},
		{"null question", "userInput.request", `{"question":null}`, `error -32602 params: question is missing`,
			userInput(func() (UserInputResponse, error) { panic("must not be asked") })},
		{"wrong shape", "userInput.request", `{"question":["q"]}`,
			`error -32602 params: json: cannot unmarshal array into Go struct field .question of type string`,
			userInput(func() (UserInputResponse, error) { panic("must not be asked") })},

		{"no handler", "exitPlanMode.request", `{"summary":"s"}`, `{"approved":true}`, SessionConfig{}},
		{"all", "exitPlanMode.request", `{"summary":"s"}`,
			`{"approved":true,"autoApproveEdits":true,"deferImplementation":true,"feedback":"f","selectedAction":"interactive"}`,
			plan(func() (ExitPlanModeResult, error) {
				return ExitPlanModeResult{true, "interactive", "f", true, true}, nil
			})},
		{"zero", "exitPlanMode.request", `{"summary":"s"}`, `{"approved":false}`, plan(func() (r ExitPlanModeResult, err error) { return })},
		{"error beside an approval", "exitPlanMode.request", `{}`, `{"approved":false}`,
			plan(func() (ExitPlanModeResult, error) { return ExitPlanModeResult{Approved: true}, errors.New("but") })},

		{"no handler", "autoModeSwitch.request", `{}`, `{"response":"no"}`, SessionConfig{}},
		{"always", "autoModeSwitch.request", `{}`, `{"response":"yes_always"}`, mode(func() (AutoModeSwitchResponse, error) { return AutoModeYesAlways, nil })},
		{"zero", "autoModeSwitch.request", `{}`, `{"response":"no"}`, mode(func() (AutoModeSwitchResponse, error) { return "", nil })},
		{"unknown", "autoModeSwitch.request", `{}`, `{"response":"no"}`, mode(func() (AutoModeSwitchResponse, error) { return "Yes", nil })},
		{"error beside yes", "autoModeSwitch.request", `{}`, `{"response":"no"}`, mode(func() (AutoModeSwitchResponse, error) { return AutoModeYes, io.EOF })},

		{"no handler", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`, `{"output":{}}`, SessionConfig{}},
		{"no type", "hooks.invoke", `{"input":{}}`, `{"output":{}}`, hook(func() (any, error) { panic("must not be asked") })},
		{"nil", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`, `{"output":{}}`, hook(func() (any, error) { return nil, nil })},
		{"map", "hooks.invoke", `{"hookType":"future","input":{}}`, `{"output":{"a":1}}`, hook(func() (any, error) { return map[string]int{"a": 1}, nil })},
		{"no object", "hooks.invoke", `{"hookType":"agentStop","input":{}}`, `{"output":{}}`, hook(func() (any, error) { return 7, nil })},
		{"no object", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`,
			fmt.Sprintf(deny, "the host's handler gave no valid answer: the output is no object"), hook(func() (any, error) { return 7, nil })},
		{"unknown decision", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`,
			fmt.Sprintf(deny, `the host's handler gave no valid answer: unknown decision "Deny"`), hook(func() (any, error) { return PreToolUseOutput{Decision: "Deny"}, nil })},
		{"no JSON", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`,
			fmt.Sprintf(deny, "json: unsupported type: chan int"), hook(func() (any, error) { return make(chan int), nil })},

		{"no handler", "systemMessage.transform", section, section, SessionConfig{}},
		{"one", "systemMessage.transform", section, `{"sections":{"identity":{"content":"bot"},"tone":{"content":"rude"}}}`,
			transform(func() (string, error) { return "rude", nil })},
		{"no sections", "systemMessage.transform", `{}`, `error -32602 params: sections are missing`, SessionConfig{}},
		{"wrong shape", "systemMessage.transform", `{"sections":7}`,
			`error -32602 params: json: cannot unmarshal number into Go struct field .sections of type map[string]copilot.promptSection`, SessionConfig{}},
	}
	for name, stop := range hdlStops() {
		why := map[bool]string{true: "boom", false: "the host's handler panicked"}[name == "error"]
		cases = append(cases,
			tc{name, "userInput.request", `{"question":"q"}`, `{"noResponse":true}`, userInput(func() (r UserInputResponse, err error) { return r, stop() })},
			tc{name, "exitPlanMode.request", `{"summary":"s"}`, `{"approved":false}`, plan(func() (r ExitPlanModeResult, err error) { return r, stop() })},
			tc{name, "autoModeSwitch.request", `{}`, `{"response":"no"}`, mode(func() (r AutoModeSwitchResponse, err error) { return r, stop() })},
			tc{name, "hooks.invoke", `{"hookType":"preToolUse","input":{}}`, fmt.Sprintf(deny, why), hook(func() (any, error) { return nil, stop() })},
			tc{name, "hooks.invoke", `{"hookType":"postToolUse","input":{}}`, `{"output":{}}`, hook(func() (any, error) { return nil, stop() })},
			tc{name, "systemMessage.transform", section, section, transform(func() (string, error) { return "x", stop() })},
		)
	}
	c, p := newPeer(t, nil)
	for i, tc := range cases {
		t.Run(tc.method+"/"+tc.name, func(t *testing.T) {
			tc.cfg.SessionID = fmt.Sprint("s", i)
			createSession(t, c, &tc.cfg)
			params := splice(json.RawMessage(tc.params), "sessionId", tc.cfg.SessionID)
			if got := hdlOutcome(t, p.request(tc.method, params)); got != hdlWant(t, tc.want) {
				t.Errorf("answered %s\nwant %s", got, tc.want)
			}
		})
	}
	for _, params := range []string{`{}`, `{"sessionId":"nobody","question":"q"}`, `{"sessionId":7}`, `null`, `[]`} {
		if got, want := hdlOutcome(t, p.request("userInput.request", json.RawMessage(params))), "error -32602 no such session here"; got != want {
			t.Errorf("params %s: answered %s, want %s", params, got, want)
		}
	}
	if got, want := hdlOutcome(t, p.request("future.request", json.RawMessage(`{"sessionId":"s1"}`))), "error -32601 method not found: future.request"; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
}

func hdlWant(t testing.TB, want string) string {
	if strings.HasPrefix(want, "error") {
		return want
	}
	return hdlJSON(t, []byte(want))
}

// TestDirectRequestInputs checks what handlers of direct requests are told.
func TestDirectRequestInputs(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	got := make(chan any, 1)
	transform := func(_ context.Context, content string) (string, error) {
		got <- content
		return "", nil
	}
	createSession(t, c, &SessionConfig{SessionID: "s",
		OnUserInput: func(_ context.Context, r UserInputRequest) (UserInputResponse, error) {
			got <- r
			return UserInputResponse{}, nil
		},
		OnExitPlanMode: func(_ context.Context, r ExitPlanModeRequest) (ExitPlanModeResult, error) {
			got <- r
			return ExitPlanModeResult{}, nil
		},
		OnAutoModeSwitch: func(_ context.Context, r AutoModeSwitchRequest) (AutoModeSwitchResponse, error) {
			got <- r
			return AutoModeYes, nil
		},
		Transforms: map[string]func(context.Context, string) (string, error){"tone": transform},
		OnHook: func(_ context.Context, h HookCall) (any, error) {
			got <- fmt.Sprintf("%s %s %s", h.SessionID, h.Type, h.Input)
			return nil, nil
		},
	})
	for _, tc := range []struct {
		method, params string
		want           any
	}{
		{"userInput.request", `{"question":"q","choices":["a"],"allowFreeform":false}`, UserInputRequest{"s", "q", []string{"a"}, false}},
		{"userInput.request", `{"question":""}`, UserInputRequest{"s", "", nil, true}},
		{"exitPlanMode.request", `{"summary":"s","planContent":"# p","actions":["interactive"],"recommendedAction":"interactive"}`,
			ExitPlanModeRequest{"s", "s", "# p", []string{"interactive"}, "interactive"}},
		{"exitPlanMode.request", `{"summary":7,"actions":"all"}`, ExitPlanModeRequest{SessionID: "s", RecommendedAction: "autopilot"}},
		{"autoModeSwitch.request", `{"errorCode":"rate_limited","retryAfterSeconds":1.5}`, AutoModeSwitchRequest{"s", "rate_limited", 1500 * time.Millisecond}},
		{"autoModeSwitch.request", `{"retryAfterSeconds":-1e400}`, AutoModeSwitchRequest{SessionID: "s"}},
		{"systemMessage.transform", `{"sections":{"tone":{"content":"polite"}}}`, "polite"},
		{"hooks.invoke", `{"hookType":"future","input":{"n":12345678901234567890}}`, `s future {"n":12345678901234567890}`},
	} {
		p.request(tc.method, splice(json.RawMessage(tc.params), "sessionId", "s"))
		if got, want := fmt.Sprintf("%+v", await(t, tc.method, got)), fmt.Sprintf("%+v", tc.want); got != want {
			t.Errorf("%s %s: handler got %s, want %s", tc.method, tc.params, got, want)
		}
	}
}

// TestTypedHooks runs every hook that has a function of its own, in both directions.
func TestTypedHooks(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	got := make(chan string, 1)
	common := func(in HookInput) string {
		return fmt.Sprintf("%s %d %s %s %s %s", in.SessionID, in.Timestamp.UnixMilli(), in.CWD, in.AgentID, in.AgentType, in.ParentAgentID)
	}
	note := func(in HookInput, f string, a ...any) { got <- common(in) + " " + fmt.Sprintf(f, a...) }
	createSession(t, c, &SessionConfig{SessionID: "s", Hooks: &Hooks{
		PreToolUse: func(_ context.Context, in PreToolUseInput) (PreToolUseOutput, error) {
			note(in.HookInput, "%s %s", in.ToolName, in.ToolArgs)
			return PreToolUseOutput{HookAllow, "why", map[string]int{"a": 2}, "more", true}, nil
		},
		PreMCPToolCall: func(_ context.Context, in PreMCPToolCallInput) (PreMCPToolCallOutput, error) {
			note(in.HookInput, "%s %s %s %s %s", in.ServerName, in.ToolName, in.Arguments, in.ToolCallID, in.Meta)
			switch in.ToolName {
			case "remove":
				return PreMCPToolCallOutput{MetaToUse: json.RawMessage("null")}, nil
			case "replace":
				return PreMCPToolCallOutput{MetaToUse: json.RawMessage(`{"b":1}`)}, nil
			}
			return PreMCPToolCallOutput{}, nil
		},
		PostToolUse: func(_ context.Context, in PostToolUseInput) (PostToolUseOutput, error) {
			var r ToolResult
			if err := json.Unmarshal(in.ToolResult, &r); err != nil {
				return PostToolUseOutput{}, err
			}
			note(in.HookInput, "%s %s %s", in.ToolName, in.ToolArgs, r.Text)
			return PostToolUseOutput{ToolResult{Text: "new", SessionLog: "log"}, "more", true}, nil
		},
		PostToolUseFailure: func(_ context.Context, in PostToolUseFailureInput) (PostToolUseFailureOutput, error) {
			note(in.HookInput, "%s %s %s", in.ToolName, in.ToolArgs, in.Error)
			return PostToolUseFailureOutput{"more"}, nil
		},
		UserPromptSubmitted: func(_ context.Context, in UserPromptSubmittedInput) (UserPromptSubmittedOutput, error) {
			note(in.HookInput, "%s", in.Prompt)
			return UserPromptSubmittedOutput{"p", "more", true}, nil
		},
		UserPromptTransformed: func(_ context.Context, in UserPromptTransformedInput) (UserPromptTransformedOutput, error) {
			note(in.HookInput, "%s %s", in.Prompt, in.TransformedPrompt)
			return UserPromptTransformedOutput{"p"}, nil
		},
		SessionStart: func(_ context.Context, in SessionStartInput) (SessionStartOutput, error) {
			note(in.HookInput, "%s %s", in.Source, in.InitialPrompt)
			return SessionStartOutput{"more", struct{}{}}, nil
		},
		SessionEnd: func(_ context.Context, in SessionEndInput) (SessionEndOutput, error) {
			note(in.HookInput, "%s %s %s", in.Reason, in.FinalMessage, in.Error)
			return SessionEndOutput{true, []string{"a"}, "sum"}, nil
		},
		ErrorOccurred: func(_ context.Context, in ErrorOccurredInput) (ErrorOccurredOutput, error) {
			note(in.HookInput, "%s %s %s %v", in.ErrorName, in.ErrorMessage, in.ErrorContext, in.Recoverable)
			return ErrorOccurredOutput{true, "retry", 2, "oh"}, nil
		},
		AgentStop: func(_ context.Context, in AgentStopInput) (AgentStopOutput, error) {
			note(in.HookInput, "%s %s %v", in.StopReason, in.TranscriptPath, in.StopHookActive)
			return AgentStopOutput{"block", "go on"}, nil
		},
		SubagentStart: func(_ context.Context, in SubagentStartInput) error {
			note(in.HookInput, "%s %s", in.AgentName, in.TranscriptPath)
			return nil
		},
		SubagentStop: func(_ context.Context, in SubagentStopInput) error {
			note(in.HookInput, "%s %s %s %s %v", in.AgentName, in.TranscriptPath, in.StopReason, in.Response, in.StopHookActive)
			return nil
		},
	}})
	for _, tc := range []struct{ hook, input, told, want string }{
		{"preToolUse", `"toolName":"bash","toolArgs":{"n":12345678901234567890}`, `bash {"n":12345678901234567890}`,
			`{"permissionDecision":"allow","permissionDecisionReason":"why","modifiedArgs":{"a":2},"additionalContext":"more","suppressOutput":true}`},
		{"preMcpToolCall", `"serverName":"m","toolName":"keep","arguments":{},"toolCallId":"t","_meta":{"x":1}`, `m keep {} t {"x":1}`, `{}`},
		{"preMcpToolCall", `"serverName":"m","toolName":"remove"`, `m remove   `, `{"metaToUse":null}`},
		{"preMcpToolCall", `"serverName":"m","toolName":"replace"`, `m replace   `, `{"metaToUse":{"b":1}}`},
		{"postToolUse", `"toolName":"bash","toolArgs":[],"toolResult":{"textResultForLlm":"old","resultType":"success"}`, `bash [] old`,
			`{"modifiedResult":{"textResultForLlm":"new","sessionLog":"log"},"additionalContext":"more","suppressOutput":true}`},
		{"postToolUseFailure", `"toolName":"bash","toolArgs":{},"error":"e"`, `bash {} e`, `{"additionalContext":"more"}`},
		{"userPromptSubmitted", `"prompt":"hi"`, `hi`, `{"modifiedPrompt":"p","additionalContext":"more","suppressOutput":true}`},
		{"userPromptTransformed", `"prompt":"hi","transformedPrompt":"<x>hi"`, `hi <x>hi`, `{"modifiedTransformedPrompt":"p"}`},
		{"sessionStart", `"source":"new","initialPrompt":"hi"`, `new hi`, `{"additionalContext":"more","modifiedConfig":{}}`},
		{"sessionEnd", `"reason":"complete","finalMessage":"bye"`, `complete bye `, `{"suppressOutput":true,"cleanupActions":["a"],"sessionSummary":"sum"}`},
		{"errorOccurred", `"error":"text","errorContext":"model_call","recoverable":true`, ` text model_call true`,
			`{"suppressOutput":true,"errorHandling":"retry","retryCount":2,"userNotification":"oh"}`},
		{"errorOccurred", `"error":{"name":"E","message":"m","stack":"s"}`, `E m  false`,
			`{"suppressOutput":true,"errorHandling":"retry","retryCount":2,"userNotification":"oh"}`},
		{"agentStop", `"stopReason":"end_turn","transcriptPath":"/t","stop_hook_active":true`, `end_turn /t true`, `{"decision":"block","reason":"go on"}`},
		{"subagentStart", `"agentName":"n","transcriptPath":"/t"`, `n /t`, `{}`},
		{"subagentStop", `"agentName":"n","transcriptPath":"/t","stopReason":"end","response":"r","stop_hook_active":false`, `n /t end "r" false`, `{}`},
	} {
		input := `{"sessionId":"sub","timestamp":1796072928843.5,"cwd":"/w","agentId":"a","agentType":"b","parentAgentId":"c",` + tc.input + `}`
		params := json.RawMessage(fmt.Sprintf(`{"sessionId":"s","hookType":%q,"input":%s}`, tc.hook, input))
		answer := hdlOutcome(t, p.request("hooks.invoke", params))
		if got, want := await(t, tc.hook, got), "sub 1796072928843 /w a b c "+tc.told; got != want {
			t.Errorf("%s was told %q, want %q", tc.hook, got, want)
		}
		if want := hdlJSON(t, []byte(`{"output":`+tc.want+`}`)); answer != want {
			t.Errorf("%s answered %s, want %s", tc.hook, answer, want)
		}
	}
	// Input that does not fit must not let a guarded tool pass.
	params := json.RawMessage(`{"sessionId":"s","hookType":"preToolUse","input":{"toolName":7}}`)
	if got := hdlOutcome(t, p.request("hooks.invoke", params)); !strings.Contains(got, `"permissionDecision":"deny"`) {
		t.Errorf("preToolUse with bad input answered %s", got)
	}
	params = json.RawMessage(`{"sessionId":"s","hookType":"postToolUseFailure","input":{"toolName":7}}`)
	if got, want := hdlOutcome(t, p.request("hooks.invoke", params)), `{"output":{}}`; got != want {
		t.Errorf("postToolUseFailure with bad input answered %s, want %s", got, want)
	}
}

func TestCase079UnknownHook(t *testing.T) {
	leakCheck(t)
	var log hdlLog
	c, p := newPeer(t, &Options{Logger: log.logger()})
	createSession(t, c, &SessionConfig{SessionID: "s", Hooks: &Hooks{PreToolUse: func(context.Context, PreToolUseInput) (PreToolUseOutput, error) {
		panic("another hook was called")
	}}})
	params := json.RawMessage(`{"sessionId":"s","hookType":"futureHook","input":{"a":1}}`)
	if got, want := hdlOutcome(t, p.request("hooks.invoke", params)), `{"output":{}}`; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
	if n := strings.Count(log.String(), "futureHook"); n != 1 || !strings.Contains(log.String(), "level=DEBUG") {
		t.Errorf("%d lines name the hook:\n%s", n, log.String())
	}
}

const (
	hdlTool       = "session.tools.handlePendingToolCall"
	hdlPermission = "session.permissions.handlePendingPermissionRequest"
	hdlElicit     = "session.ui.handlePendingElicitation"
	hdlCommand    = "session.commands.handlePendingCommand"
	hdlOAuth      = "session.mcp.oauth.handlePendingRequest"
	hdlSampling   = "session.ui.handlePendingSampling"
)

func hdlToolConfig(f func(ctx context.Context, call ToolCall) (ToolResult, error)) SessionConfig {
	return SessionConfig{Tools: []Tool{{Name: "t", Handler: f}, {Name: "declared"}}}
}

func hdlDecide(f func() (PermissionDecision, error)) SessionConfig {
	return SessionConfig{OnPermission: func(context.Context, PermissionRequest) (PermissionDecision, error) { return f() }}
}

// TestBroadcastAnswers asks each question that comes as an event, with all that a host may do about it, and compares the call that answers.
// Covers cases 070, 071, 075, 080 and 081.
func TestBroadcastAnswers(t *testing.T) {
	leakCheck(t)
	type tc struct {
		name   string
		event  EventType
		data   string
		method string
		want   string // the answer's params besides both ids
		cfg    SessionConfig
	}
	const called = `"toolName":"t","toolCallId":"c"`
	result := func(r ToolResult) SessionConfig {
		return hdlToolConfig(func(context.Context, ToolCall) (ToolResult, error) { return r, nil })
	}
	typed := func(tool Tool) SessionConfig { return SessionConfig{Tools: []Tool{tool}} }
	elicit := func(f func() (ElicitationResult, error)) SessionConfig {
		return SessionConfig{OnElicitation: func(context.Context, ElicitationRequest) (ElicitationResult, error) { return f() }}
	}
	command := func(f func() error) SessionConfig {
		return SessionConfig{Commands: []Command{{Name: "deploy", Handler: func(context.Context, CommandCall) error { return f() }}}}
	}
	auth := func(f func() (*MCPAuthToken, error)) SessionConfig {
		return SessionConfig{OnMCPAuth: func(context.Context, MCPAuthRequest) (*MCPAuthToken, error) { return f() }}
	}
	sampling := func(f func() (any, error)) SessionConfig {
		return SessionConfig{OnSampling: func(context.Context, SamplingRequest) (any, error) { return f() }}
	}
	decide := func(d PermissionDecision) SessionConfig {
		return hdlDecide(func() (PermissionDecision, error) { return d, nil })
	}
	shell := `"permissionRequest":{"kind":"shell"}`
	url := `"permissionRequest":{"kind":"url"}`
	failed := func(text string) string {
		return fmt.Sprintf(`{"result":{"textResultForLlm":%q,"resultType":"failure","error":%q}}`, text, text)
	}
	unavailable := `{"result":{"kind":"user-not-available"}}`
	type answer struct {
		N int    `json:"n"`
		S string `json:"s"`
	}
	cases := []tc{
		{"zero", EventExternalToolRequested, called, hdlTool, `{"result":""}`, result(ToolResult{})},
		{"text", EventExternalToolRequested, called, hdlTool, `{"result":"<ok> & ü"}`, result(ToolResult{Text: "<ok> & ü"})},
		{"everything", EventExternalToolRequested, called, hdlTool, `{"result":{"textResultForLlm":"x","resultType":"success","sessionLog":"log",
			"toolTelemetry":{"metrics":{"n":1}},"binaryResultsForLlm":[{"type":"image","data":"AQI=","mimeType":"image/png"}],
			"contents":[{"type":"text","text":"x"}],"toolReferences":["other"]}}`,
			result(ToolResult{Text: "x", Type: ToolSuccess, SessionLog: "log", Telemetry: map[string]any{"metrics": map[string]int{"n": 1}},
				Binary: []ToolBinary{NewToolBinary("image/png", []byte{1, 2})}, Contents: []ToolContent{{Type: "text", Text: "x"}}, References: []string{"other"}})},
		{"failure", EventExternalToolRequested, called, hdlTool, failed("broken"), result(ToolResult{Type: ToolFailure, Error: "broken"})},
		{"error without type", EventExternalToolRequested, called, hdlTool, failed("broken"), result(ToolResult{Error: "broken"})},
		{"denied", EventExternalToolRequested, called, hdlTool, `{"result":{"textResultForLlm":"no","resultType":"denied"}}`, result(ToolResult{Text: "no", Type: ToolDenied})},
		{"unknown type", EventExternalToolRequested, called, hdlTool, failed(`the host's handler gave no valid answer: unknown tool result type "failed"`),
			result(ToolResult{Text: "x", Type: "failed"})},
		{"no encoding", EventExternalToolRequested, called, hdlTool, failed("the server did not accept the host's answer"),
			result(ToolResult{Telemetry: map[string]any{"x": make(chan int)}})},
		{"no call id", EventExternalToolRequested, `"toolName":"t"`, hdlTool, failed("the request has no toolCallId"), result(ToolResult{Text: "x"})},
		{"odd call id", EventExternalToolRequested, `"toolName":"t","toolCallId":7`, hdlTool, failed("the request has no toolCallId"), result(ToolResult{Text: "x"})},

		{"typed struct", EventExternalToolRequested, called, hdlTool, `{"result":"{\"n\":1,\"s\":\"<\"}"}`,
			typed(NewTool("t", "", func(context.Context, struct{}) (answer, error) { return answer{1, "<"}, nil }))},
		{"typed string", EventExternalToolRequested, called, hdlTool, `{"result":"plain"}`, typed(NewTool("t", "", func(context.Context, struct{}) (string, error) { return "plain", nil }))},
		{"typed empty string", EventExternalToolRequested, called, hdlTool, `{"result":""}`, typed(NewTool("t", "", func(context.Context, struct{}) (string, error) { return "", nil }))},
		{"typed bytes", EventExternalToolRequested, called, hdlTool, `{"result":"plain"}`, typed(NewTool("t", "", func(context.Context, struct{}) ([]byte, error) { return []byte("plain"), nil }))},
		{"typed binary", EventExternalToolRequested, called, hdlTool,
			`{"result":{"textResultForLlm":"","binaryResultsForLlm":[{"type":"resource","data":"/w==","mimeType":"application/octet-stream"}]}}`,
			typed(NewTool("t", "", func(context.Context, struct{}) ([]byte, error) { return []byte{255}, nil }))},
		{"typed map", EventExternalToolRequested, called, hdlTool, `{"result":"{\"a\":1}"}`, typed(NewTool("t", "", func(context.Context, struct{}) (map[string]int, error) { return map[string]int{"a": 1}, nil }))},
		{"typed nil map", EventExternalToolRequested, called, hdlTool, `{"result":""}`, typed(NewTool("t", "", func(context.Context, struct{}) (map[string]int, error) { return nil, nil }))},
		{"typed nil any", EventExternalToolRequested, called, hdlTool, `{"result":""}`, typed(NewTool("t", "", func(context.Context, struct{}) (any, error) { return nil, nil }))},
		{"typed nil result", EventExternalToolRequested, called, hdlTool, `{"result":""}`, typed(NewTool("t", "", func(context.Context, struct{}) (*ToolResult, error) { return nil, nil }))},
		{"typed result", EventExternalToolRequested, called, hdlTool, failed("no"), typed(NewTool("t", "", func(context.Context, struct{}) (*ToolResult, error) { return &ToolResult{Error: "no"}, nil }))},
		{"typed raw", EventExternalToolRequested, called, hdlTool, `{"result":"[1]"}`, typed(NewTool("t", "", func(context.Context, struct{}) (json.RawMessage, error) { return json.RawMessage("[1]"), nil }))},
		{"typed channel", EventExternalToolRequested, called, hdlTool, failed("json: unsupported type: chan int"), typed(NewTool("t", "", func(context.Context, struct{}) (chan int, error) { return make(chan int), nil }))},
		{"typed list for object", EventExternalToolRequested, called + `,"arguments":[]`, hdlTool,
			failed("arguments of t: json: cannot unmarshal array into Go value of type struct {}"), typed(NewTool("t", "", func(context.Context, struct{}) (string, error) { return "no", nil }))},
		{"typed text for object", EventExternalToolRequested, called + `,"arguments":"{}"`, hdlTool,
			failed("arguments of t: json: cannot unmarshal string into Go value of type struct {}"), typed(NewTool("t", "", func(context.Context, struct{}) (string, error) { return "no", nil }))},
		{"typed digits", EventExternalToolRequested, called + `,"arguments":{"id":12345678901234567890,"any":1.10}`, hdlTool, `{"result":"12345678901234567890 1.10"}`,
			typed(NewTool("t", "", func(_ context.Context, in struct {
				ID  uint64 `json:"id"`
				Any any    `json:"any"`
			}) (string, error) {
				return fmt.Sprint(in.ID, " ", in.Any), nil
			}))},

		{"once", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-once"}}`, decide(ApproveOnce())},
		{"interactive", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-once","approvedInteractively":true}}`, decide(ApproveOnce().Interactive())},
		{"session", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-for-session"}}`, decide(ApproveForSession(PermissionApproval{}))},
		{"session commands", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-for-session","approval":{"kind":"commands","commandIdentifiers":["ls"]}}}`,
			decide(ApproveForSession(PermissionApproval{Kind: "commands", CommandIdentifiers: []string{"ls"}}))},
		{"session server", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-for-session","approval":{"kind":"mcp","serverName":"m","toolName":null}}}`,
			decide(ApproveForSession(PermissionApproval{Kind: "mcp", ServerName: "m"}))},
		{"session domain", EventPermissionRequested, url, hdlPermission, `{"result":{"kind":"approve-for-session","domain":"example.com"}}`, decide(ApproveDomainForSession("example.com"))},
		{"location", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-for-location","approval":{"kind":"write"},"locationKey":"k"}}`,
			decide(ApproveForLocation(PermissionApproval{Kind: "write"}, "k"))},
		{"permanently", EventPermissionRequested, url, hdlPermission, `{"result":{"kind":"approve-permanently","domain":"example.com"}}`, decide(ApprovePermanently("example.com"))},
		{"reject", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"reject"}}`, decide(Reject(""))},
		{"feedback", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"reject","feedback":"not today"}}`, decide(Reject("not today"))},
		{"not available", EventPermissionRequested, shell, hdlPermission, unavailable, decide(UserNotAvailable())},
		{"context", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"reject","feedback":"f"},"decisionContext":{"outcome":"prompted_user","source":"human_response","surface":"sdk","responseCapability":"interactive"}}`,
			decide(Reject("f").WithContext(DecisionContext{"prompted_user", "human_response", "sdk", "interactive"}))},
		{"zero", EventPermissionRequested, shell, hdlPermission, unavailable, decide(PermissionDecision{})},
		{"zero interactive", EventPermissionRequested, shell, hdlPermission, unavailable, decide(PermissionDecision{}.Interactive())},
		{"approval beside an error", EventPermissionRequested, shell, hdlPermission, unavailable, hdlDecide(func() (PermissionDecision, error) { return ApproveOnce(), io.EOF })},
		{"location without key", EventPermissionRequested, shell, hdlPermission, unavailable, decide(ApproveForLocation(PermissionApproval{Kind: "write"}, ""))},
		{"location without approval", EventPermissionRequested, shell, hdlPermission, unavailable, decide(ApproveForLocation(PermissionApproval{}, "k"))},
		{"unknown approval", EventPermissionRequested, shell, hdlPermission, unavailable, decide(ApproveForSession(PermissionApproval{Kind: "all"}))},
		{"approval of nothing", EventPermissionRequested, shell, hdlPermission, unavailable, decide(ApproveForSession(PermissionApproval{Kind: "commands"}))},
		{"permanently, no url", EventPermissionRequested, shell, hdlPermission, unavailable, decide(ApprovePermanently("example.com"))},
		{"ApproveAll", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-once"}}`, SessionConfig{OnPermission: ApproveAll}},
		{"ApproveAll managed", EventPermissionRequested, shell, hdlPermission, unavailable, SessionConfig{OnPermission: ApproveAll, ManagedSettings: &ManagedSettings{}}},
		{"ApproveAll enabled managed", EventPermissionRequested, shell, hdlPermission, unavailable, SessionConfig{OnPermission: ApproveAll, EnableManagedSettings: or[bool](nil, true)}},
		{"DenyAll", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"reject","feedback":"denied by the host's policy"}}`, SessionConfig{OnPermission: DenyAll}},
		{"ApproveIf true", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-once"}}`,
			SessionConfig{OnPermission: ApproveIf(func(r PermissionRequest) bool { return r.Kind == PermissionShell })}},
		{"ApproveIf false", EventPermissionRequested, url, hdlPermission, `{"result":{"kind":"reject","feedback":"denied by the host's policy"}}`,
			SessionConfig{OnPermission: ApproveIf(func(r PermissionRequest) bool { return r.Kind == PermissionShell })}},
		{"ApproveIf false, human wanted", EventPermissionRequested, `"permissionRequest":{"kind":"url","managedApprovalRequired":true}`, hdlPermission,
			`{"result":{"kind":"reject","feedback":"denied by the host's policy"}}`, SessionConfig{OnPermission: ApproveIf(func(r PermissionRequest) bool { return false })}},

		{"accept", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"accept","content":{"n":1.10,"s":"x"}}}`,
			elicit(func() (ElicitationResult, error) {
				return ElicitationResult{ElicitationAccept, map[string]any{"n": json.Number("1.10"), "s": "x"}}, nil
			})},
		{"accept nothing", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"accept","content":{}}}`,
			elicit(func() (ElicitationResult, error) { return ElicitationResult{Action: ElicitationAccept}, nil })},
		{"accept page", EventElicitationRequested, `"message":"m","mode":"url","url":"http://127.0.0.1/"`, hdlElicit, `{"result":{"action":"accept"}}`,
			elicit(func() (ElicitationResult, error) {
				return ElicitationResult{ElicitationAccept, map[string]any{"x": 1}}, nil
			})},
		{"decline", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"decline"}}`,
			elicit(func() (ElicitationResult, error) {
				return ElicitationResult{ElicitationDecline, map[string]any{"x": 1}}, nil
			})},
		{"cancel", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"cancel"}}`,
			elicit(func() (ElicitationResult, error) {
				return ElicitationResult{ElicitationCancel, map[string]any{"x": 1}}, nil
			})},
		{"zero", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"cancel"}}`, elicit(func() (r ElicitationResult, err error) { return })},
		{"unknown", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"cancel"}}`,
			elicit(func() (ElicitationResult, error) { return ElicitationResult{Action: "Accept"}, nil })},
		{"no encoding", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"cancel"}}`,
			elicit(func() (ElicitationResult, error) {
				return ElicitationResult{ElicitationAccept, map[string]any{"x": io.EOF.Error}}, nil
			})},

		{"done", EventCommandExecute, `"commandName":"deploy"`, hdlCommand, `{}`, command(func() error { return nil })},

		{"token", EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"token","accessToken":"tok","tokenType":"Bearer","expiresIn":90}}`,
			auth(func() (*MCPAuthToken, error) {
				return &MCPAuthToken{"tok", "Bearer", 90*time.Second + time.Millisecond}, nil
			})},
		{"token only", EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"token","accessToken":"tok"}}`,
			auth(func() (*MCPAuthToken, error) { return &MCPAuthToken{AccessToken: "tok"}, nil })},
		{"declined", EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"cancelled"}}`, auth(func() (*MCPAuthToken, error) { return nil, nil })},
		{"no text", EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"cancelled"}}`, auth(func() (*MCPAuthToken, error) { return &MCPAuthToken{}, nil })},
		{"token beside an error", EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"cancelled"}}`,
			auth(func() (*MCPAuthToken, error) { return &MCPAuthToken{AccessToken: "tok"}, io.EOF })},

		{"message", EventSamplingRequested, `"serverName":"m","mcpRequestId":1`, hdlSampling, `{"response":{"role":"assistant"}}`,
			sampling(func() (any, error) { return map[string]string{"role": "assistant"}, nil })},
		{"declined", EventSamplingRequested, `"serverName":"m"`, hdlSampling, `{}`, sampling(func() (any, error) { return nil, nil })},
		{"no encoding", EventSamplingRequested, `"serverName":"m"`, hdlSampling, `{}`, sampling(func() (any, error) { return make(chan int), nil })},
	}
	for name, stop := range hdlStops() {
		why := map[bool]string{true: "boom", false: "the host's handler panicked"}[name == "error"]
		cases = append(cases,
			tc{name, EventExternalToolRequested, called, hdlTool, failed(why), hdlToolConfig(func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{Text: "x"}, stop() })},
			tc{name, EventPermissionRequested, shell, hdlPermission, unavailable, hdlDecide(func() (PermissionDecision, error) { return ApproveOnce(), stop() })},
			tc{name, EventPermissionRequested, shell, hdlPermission, unavailable, SessionConfig{OnPermission: ApproveIf(func(PermissionRequest) bool { _ = stop(); panic("error") })}},
			tc{name, EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"cancel"}}`, elicit(func() (ElicitationResult, error) { return ElicitationResult{Action: ElicitationAccept}, stop() })},
			tc{name, EventCommandExecute, `"commandName":"deploy"`, hdlCommand, fmt.Sprintf(`{"error":%q}`, why), command(stop)},
			tc{name, EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"cancelled"}}`, auth(func() (*MCPAuthToken, error) { return nil, stop() })},
			tc{name, EventSamplingRequested, `"serverName":"m"`, hdlSampling, `{}`, sampling(func() (any, error) { return 1, stop() })},
		)
	}
	var log hdlLog
	c, p := newPeer(t, &Options{Logger: log.logger()})
	answers := make(map[string]int)
	for i, tc := range cases {
		t.Run(string(tc.event)+"/"+tc.name, func(t *testing.T) {
			tc.cfg.SessionID = fmt.Sprint("s", i)
			s := createSession(t, c, &tc.cfg)
			p.emit(s.ID(), string(tc.event), json.RawMessage(`{"requestId":"r",`+tc.data+`}`))
			answers[tc.method]++
			got := hdlJSON(t, p.wait(tc.method, answers[tc.method]).Params)
			want := splice(splice(json.RawMessage(tc.want), "requestId", "r"), "sessionId", s.ID())
			if want := hdlJSON(t, want); got != want {
				t.Errorf("answered %s\nwant %s", got, want)
			}
			if strings.Contains(got, ".go") || strings.Contains(got, "goroutine") {
				t.Errorf("a stack reached the server: %s", got)
			}
		})
	}
	if !strings.Contains(log.String(), "bang") || !strings.Contains(log.String(), "zz_handlers_test.go") {
		t.Error("no panic with its stack in the log")
	}
}

// TestBroadcastInputs checks what handlers of broadcasts are told.
func TestBroadcastInputs(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	got := make(chan any, 1)
	createSession(t, c, &SessionConfig{SessionID: "s",
		Tools: []Tool{{Name: "t", Handler: func(ctx context.Context, call ToolCall) (ToolResult, error) {
			parent, state := TraceContextFrom(ctx)
			got <- fmt.Sprintf("%s %s %s %s %s %s %s %s %s", call.SessionID, call.RequestID, call.ID, call.Name, call.Arguments, call.WorkingDirectory, call.AgentID, parent, state)
			return ToolResult{}, nil
		}}},
		OnPermission: func(_ context.Context, r PermissionRequest) (PermissionDecision, error) {
			got <- r
			return NoResult(), nil
		},
		OnElicitation: func(_ context.Context, r ElicitationRequest) (ElicitationResult, error) {
			got <- fmt.Sprintf("%s %s %s %s %s %s %s %s %s", r.SessionID, r.RequestID, r.ToolCallID, r.Source, r.Message, r.Mode, r.Schema, r.URL, r.ElicitationID)
			return ElicitationResult{}, nil
		},
		Commands: []Command{{Name: "deploy", Handler: func(_ context.Context, c CommandCall) error {
			got <- fmt.Sprintf("%s %s|%s|%s", c.SessionID, c.Name, c.Args, c.Text)
			return nil
		}}},
		OnMCPAuth: func(_ context.Context, r MCPAuthRequest) (*MCPAuthToken, error) {
			got <- fmt.Sprintf("%s %s %s %s %s %s %s %s %d %s %s", r.SessionID, r.RequestID, r.ServerName, r.ServerURL, r.Reason, r.Client.ClientID, r.Client.ClientSecret,
				r.Challenge.Scope, r.Response.StatusCode, r.Response.Headers[0].Value, r.ResourceMetadata)
			return nil, nil
		},
		OnSampling: func(_ context.Context, r SamplingRequest) (any, error) {
			got <- fmt.Sprintf("%s %s %s %s", r.SessionID, r.ServerName, r.MCPRequestID, r.Request)
			return nil, nil
		},
	})
	n := 0
	tell := func(typ EventType, data string, extra ...any) any {
		t.Helper()
		n++
		p.emit("s", string(typ), splice(json.RawMessage(data), "requestId", fmt.Sprint("r", n)), extra...)
		return await(t, string(typ), got)
	}
	for _, tc := range []struct {
		typ        EventType
		data, want string
	}{
		{EventExternalToolRequested, `{"toolName":"t","toolCallId":"c","arguments":{"n":12345678901234567890,"e":"\u00fc"},"workingDirectory":"/w"}`,
			`s r1 c t {"n":12345678901234567890,"e":"\u00fc"} /w sub  `},
		{EventExternalToolRequested, `{"toolName":"t","toolCallId":"c","traceparent":"00-a-b-01","tracestate":"k=v"}`, `s r2 c t {}  sub 00-a-b-01 k=v`},
		{EventExternalToolRequested, `{"toolName":"t","toolCallId":"c","arguments":null}`, `s r3 c t {}  sub  `},
		{EventExternalToolRequested, `{"toolName":"t","toolCallId":"c","arguments":"text"}`, `s r4 c t "text"  sub  `},
		{EventElicitationRequested, `{"message":"m","toolCallId":"c","elicitationSource":"srv","requestedSchema":{"type":"object"}}`, `s r5 c srv m form {"type":"object"}  `},
		{EventElicitationRequested, `{"message":"m","mode":"url","url":"u","elicitationId":"e"}`, `s r6   m url  u e`},
		{EventCommandExecute, `{"commandName":"deploy","args":"prod now","command":"/deploy prod now"}`, `s deploy|prod now|/deploy prod now`},
		{EventMCPOAuthRequired, `{"serverName":"m","serverUrl":"u","reason":"initial","staticClientConfig":{"clientId":"i","clientSecret":"hush"},
			"wwwAuthenticateParams":{"scope":"sc"},"httpResponse":{"statusCode":401,"headers":[{"name":"X","value":"v"}]},"resourceMetadata":"{}"}`, `s r8 m u initial i hush sc 401 v {}`},
		{EventSamplingRequested, `{"serverName":"m","mcpRequestId":7,"request":{"messages":[]}}`, `s m 7 {"messages":[]}`},
	} {
		if got := tell(tc.typ, tc.data, "agentId", "sub"); got != tc.want {
			t.Errorf("%s: handler got %q, want %q", tc.typ, got, tc.want)
		}
	}

	ask := func(data string) PermissionRequest {
		return tell(EventPermissionRequested, data, "agentId", "sub").(PermissionRequest)
	}
	r := ask(`{"permissionRequest":{"kind":"shell","toolCallId":"c","fullCommandText":"ls > x","intention":"look","commands":[{"identifier":"ls","readOnly":true}],
		"possiblePaths":["x"],"possibleUrls":[{"url":"u"}],"hasWriteFileRedirection":true,"canOfferSessionApproval":true,"requestSandboxBypassReason":null},"promptRequest":{"kind":"commands"}}`)
	if r.SessionID != "s" || r.AgentID != "sub" || r.Kind != PermissionShell || r.ToolCallID != "c" || r.Intention != "look" || r.FullCommandText != "ls > x" ||
		!r.Commands[0].ReadOnly || r.PossibleURLs[0].URL != "u" || !r.HasWriteFileRedirection || !r.CanOfferSessionApproval || len(r.Paths()) != 1 ||
		string(r.Prompt) != `{"kind":"commands"}` || r.Managed || r.ManagedApprovalRequired || r.RequestID == "" || !bytes.Contains(r.Raw, []byte("fullCommandText")) {
		t.Errorf("got %+v", r)
	}
	if r := ask(`{"kind":"read","path":"/etc","intention":"look"}`); r.Kind != PermissionRead || r.Paths()[0] != "/etc" {
		t.Errorf("request without its object: got %+v", r)
	}
	if r := ask(`{"permissionRequest":{"kind":"read","path":["/etc"]}}`); r.Kind != "" || r.Path != "" || !bytes.Contains(r.Raw, []byte(`["/etc"]`)) {
		t.Errorf("request that does not fit: got %+v", r)
	}
	if r := ask(`{"permissionRequest":{"kind":"future","x":1}}`); r.Kind != "future" || !bytes.Contains(r.Raw, []byte(`"x":1`)) {
		t.Errorf("unknown kind: got %+v", r)
	}
	for _, required := range []string{`true`, `"false"`, `0`, `{}`} {
		if r := ask(`{"permissionRequest":{"kind":"read","managedApprovalRequired":` + required + `}}`); !r.ManagedApprovalRequired {
			t.Errorf("managedApprovalRequired %s passes for a no", required)
		}
		if r := ask(`{"permissionRequest":{"kind":"read"},"promptRequest":{"managedApprovalRequired":` + required + `}}`); !r.ManagedApprovalRequired {
			t.Errorf("prompt's managedApprovalRequired %s passes for a no", required)
		}
	}
	if r := ask(`{"permissionRequest":{"kind":"read","managedApprovalRequired":null},"promptRequest":{"managedApprovalRequired":false}}`); r.ManagedApprovalRequired {
		t.Error("managedApprovalRequired null and false count as yes")
	}
}

// hdlQuiet returns when no handler of the session is at work any more and all that was written has been read.
func hdlQuiet(t testing.TB, p *peer, s *Session) {
	t.Helper()
	p.sync()
	for {
		s.tasks.mu.Lock()
		var one *task
		for _, one = range s.tasks.byKey {
			break
		}
		s.tasks.mu.Unlock()
		if one == nil {
			break
		}
		await(t, "end of a handler", one.ctx.Done()) // at the latest when it is over
		runtime.Gosched()
	}
	if _, err := s.client.call(testContext(t), "ping", nil, nil); err != nil {
		t.Fatal(err)
	}
}

// TestBroadcastsLeftAlone: what is not ours, or is not to be answered, gets no answer. Covers cases 072 and 076, and the stray broadcast of 077.
func TestBroadcastsLeftAlone(t *testing.T) {
	leakCheck(t)
	called := func(what string) func(context.Context, ToolCall) (ToolResult, error) {
		return func(context.Context, ToolCall) (ToolResult, error) {
			t.Error(what + " was called")
			return ToolResult{}, nil
		}
	}
	tools := hdlToolConfig(called("t"))
	asked := hdlDecide(func() (PermissionDecision, error) { t.Error("asked"); return ApproveOnce(), nil })
	form := SessionConfig{OnElicitation: func(context.Context, ElicitationRequest) (ElicitationResult, error) {
		t.Error("form shown")
		return ElicitationResult{}, nil
	}}
	c, p := newPeer(t, nil)
	createSession(t, c, &SessionConfig{SessionID: "other", Tools: []Tool{{Name: "elsewhere", Handler: called("elsewhere")}}})
	for i, tc := range []struct {
		name string
		typ  EventType
		data string
		cfg  SessionConfig
	}{
		{"no handlers", EventPermissionRequested, `{"requestId":"r","permissionRequest":{"kind":"shell"}}`, SessionConfig{}},
		{"no handlers", EventElicitationRequested, `{"requestId":"r","message":"m"}`, SessionConfig{}},
		{"no handlers", EventMCPOAuthRequired, `{"requestId":"r","serverName":"m"}`, SessionConfig{}},
		{"no handlers", EventSamplingRequested, `{"requestId":"r","serverName":"m"}`, SessionConfig{}},
		{"no handlers", EventCommandQueued, `{"requestId":"r","command":"/x"}`, SessionConfig{}},
		{"unknown tool", EventExternalToolRequested, `{"requestId":"r","toolName":"u","toolCallId":"c"}`, tools},
		{"tool without name", EventExternalToolRequested, `{"requestId":"r","toolName":"","toolCallId":"c"}`, tools},
		{"tool of another session", EventExternalToolRequested, `{"requestId":"r","toolName":"elsewhere","toolCallId":"c"}`, tools},
		{"declared tool", EventExternalToolRequested, `{"requestId":"r","toolName":"declared","toolCallId":"c"}`, tools},
		{"odd tool name", EventExternalToolRequested, `{"requestId":"r","toolName":["t"],"toolCallId":"c"}`, tools},
		{"no request id", EventExternalToolRequested, `{"toolName":"t","toolCallId":"c"}`, tools},
		{"odd request id", EventExternalToolRequested, `{"requestId":1,"toolName":"t","toolCallId":"c"}`, tools},
		{"no data", EventExternalToolRequested, `null`, tools},
		{"unknown command", EventCommandExecute, `{"requestId":"r","commandName":"deploy"}`, tools},
		{"hook decided", EventPermissionRequested, `{"requestId":"r","resolvedByHook":true,"permissionRequest":{"kind":"shell"}}`, asked},
		{"empty request id", EventPermissionRequested, `{"requestId":"","permissionRequest":{"kind":"shell"}}`, asked},
		{"odd form", EventElicitationRequested, `{"requestId":"r","message":["m"]}`, form},
		{"no result", EventPermissionRequested, `{"requestId":"r","permissionRequest":{"kind":"shell"}}`, hdlDecide(func() (PermissionDecision, error) { return NoResult(), nil })},
		{"human wanted", EventPermissionRequested, `{"requestId":"r","permissionRequest":{"kind":"shell","managedApprovalRequired":true}}`, SessionConfig{OnPermission: ApproveAll}},
		{"human wanted", EventPermissionRequested, `{"requestId":"r","permissionRequest":{"kind":"shell","managedApprovalRequired":"x"}}`,
			SessionConfig{OnPermission: ApproveIf(func(PermissionRequest) bool { return true })}},
	} {
		t.Run(string(tc.typ)+"/"+tc.name, func(t *testing.T) {
			tc.cfg.SessionID = fmt.Sprint("s", i)
			s := createSession(t, c, &tc.cfg)
			p.emit(s.ID(), string(tc.typ), json.RawMessage(tc.data))
			hdlQuiet(t, p, s)
			for _, m := range p.calls("") {
				if m.get("sessionId") == s.ID() && m.Method != "session.create" && !strings.HasPrefix(m.Method, "session.eventLog") {
					t.Errorf("the client called %s %s", m.Method, m.Params)
				}
			}
			if flag := p.calls("session.create")[i+1].get("requestPermission"); flag != (tc.cfg.OnPermission != nil) {
				t.Errorf("requestPermission is %v", flag)
			}
		})
	}
}

// TestDuplicateBroadcasts: one request, one call of the handler, one answer.
func TestDuplicateBroadcasts(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	calls := make(chan string, 8)
	s := createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: func(_ context.Context, c ToolCall) (ToolResult, error) {
		calls <- c.RequestID
		return ToolResult{}, nil
	}}}})
	ask := func(id string) any {
		return p.event("s", "external_tool.requested", map[string]any{"requestId": id, "toolName": "t", "toolCallId": "c"})
	}
	p.send(ask("r1"), ask("r1"))
	p.wait(hdlTool, 1)
	hdlQuiet(t, p, s)
	p.send(ask("r1"), ask("r2")) // long after
	p.wait(hdlTool, 2)
	hdlQuiet(t, p, s)
	if n := len(p.calls(hdlTool)); n != 2 || len(calls) != 2 {
		t.Errorf("%d answers by %d calls to 2 requests", n, len(calls))
	}
}

// hdlBlock is a handler that waits for its context, or for release, and tells when it has begun and why it ended.
type hdlBlock struct {
	begun   chan context.Context
	causes  chan error
	release chan struct{}
}

func newHdlBlock() *hdlBlock {
	return &hdlBlock{make(chan context.Context, 8), make(chan error, 8), make(chan struct{})}
}

func (b *hdlBlock) wait(ctx context.Context) error {
	b.begun <- ctx
	select {
	case <-ctx.Done():
		b.causes <- context.Cause(ctx)
		return ctx.Err()
	case <-b.release:
		return nil
	}
}

func (b *hdlBlock) tool(ctx context.Context, _ ToolCall) (ToolResult, error) {
	return ToolResult{Text: "done"}, b.wait(ctx)
}

func (b *hdlBlock) permission(ctx context.Context, _ PermissionRequest) (PermissionDecision, error) {
	return ApproveOnce(), b.wait(ctx)
}

func (p *peer) askTool(session, id string) {
	p.emit(session, "external_tool.requested", map[string]any{"requestId": id, "toolName": "t", "toolCallId": "c-" + id})
}

func (p *peer) askPermission(session, id string) {
	p.emit(session, "permission.requested", map[string]any{"requestId": id, "permissionRequest": map[string]any{"kind": "shell"}})
}

// TestCase078PendingPermission: whatever takes the request's reason away ends the wait, and tells what it was.
func TestCase078PendingPermission(t *testing.T) {
	leakCheck(t)
	const unavailable = `"result":{"kind":"user-not-available"}`
	causes := make(map[string]error)
	for _, tc := range []struct {
		name   string
		end    func(c *Client, p *peer, s *Session) error
		want   error
		answer bool
	}{
		{"abort event", func(c *Client, p *peer, s *Session) error {
			p.emit("s", "abort", map[string]any{"reason": "user_initiated"})
			return nil
		}, ErrAborted, true},
		{"Abort", func(c *Client, p *peer, s *Session) error { return s.Abort(testContext(t)) }, ErrAborted, true},
		{"Disconnect", func(c *Client, p *peer, s *Session) error { return s.Disconnect(testContext(t)) }, errLeaving, true},
		{"Stop", func(c *Client, p *peer, s *Session) error { return c.Stop(testContext(t)) }, errStopping, true},
		{"completed", func(c *Client, p *peer, s *Session) error {
			p.emit("s", "permission.completed", map[string]any{"requestId": "r", "result": map[string]any{"kind": "approved"}})
			return nil
		}, errResolved, false},
		{"deleted", func(c *Client, p *peer, s *Session) error {
			p.send(notification("session.lifecycle", map[string]any{"type": "session.deleted", "sessionId": "s"}))
			return nil
		}, ErrSessionNotFound, false},
		{"ForceStop", func(c *Client, p *peer, s *Session) error { c.ForceStop(); return nil }, ErrClosed, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, p := newPeer(t, nil)
			b := newHdlBlock()
			released := make(chan struct{})
			p.handle("session.destroy", func(p *peer, m peerMessage) any { // answered when the host's answer has come
				go func() {
					<-released
					p.answer(m.ID, map[string]any{"success": true})
				}()
				return noAnswer
			})
			s := createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: b.permission})
			p.askPermission("s", "r")
			ctx := await(t, "handler", b.begun)
			ended := async(func() error { return tc.end(c, p, s) })
			cause := await(t, "handler's context", b.causes)
			if !errors.Is(cause, tc.want) {
				t.Errorf("cause is %v, want %v", cause, tc.want)
			}
			causes[tc.name] = cause
			if tc.answer {
				if got := p.wait(hdlPermission, 1); !bytes.Contains(got.Params, []byte(unavailable)) {
					t.Errorf("answered %s", got.Params)
				}
			}
			close(released)
			if err := await(t, tc.name, ended); err != nil {
				t.Error(err)
			}
			await(t, "end of the handler", ctx.Done())
			if !tc.answer && c.conn.failure() == nil {
				hdlQuiet(t, p, s)
				if n := len(p.calls(hdlPermission)); n != 0 {
					t.Errorf("%d answers to what was resolved already", n)
				}
			}
		})
	}
	for _, pair := range [][2]string{{"Abort", "Disconnect"}, {"Disconnect", "Stop"}, {"Stop", "completed"}, {"completed", "Abort"}} {
		if causes[pair[0]] == causes[pair[1]] {
			t.Errorf("%s and %s have the same cause: %v", pair[0], pair[1], causes[pair[0]])
		}
	}
}

// TestCase065AbortWithTool: abort ends the tool's context, what the tool says still goes out, and the waiter is told.
func TestCase065AbortWithTool(t *testing.T) {
	leakCheck(t)
	for _, byEvent := range []bool{true, false} {
		c, p := newPeer(t, nil)
		b := newHdlBlock()
		s := createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: b.tool}},
			Commands: []Command{{Name: "deploy", Handler: func(ctx context.Context, _ CommandCall) error { return b.wait(ctx) }}}})
		ctx, cancel := context.WithCancel(testContext(t))
		turn := async(func() error { _, err := s.SendAndWait(ctx, Message{Prompt: "x"}); return err })
		p.wait("session.send", 1)
		p.emit("s", "command.execute", map[string]any{"requestId": "cmd", "commandName": "deploy"}) // no part of the turn
		command := await(t, "command", b.begun)
		p.askTool("s", "r")
		await(t, "tool", b.begun)
		p.handle("session.abort", func(p *peer, m peerMessage) any {
			if byEvent {
				p.emit("s", "abort", map[string]any{"reason": "user_initiated"})
			}
			return map[string]any{"success": true}
		})
		if err := s.Abort(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if cause := await(t, "tool's context", b.causes); !errors.Is(cause, ErrAborted) {
			t.Errorf("cause is %v", cause)
		}
		if got := p.wait(hdlTool, 1); got.get("requestId") != "r" {
			t.Errorf("answered %s", got.Params)
		}
		if command.Err() != nil {
			t.Errorf("the abort of the turn ended a command: %v", context.Cause(command))
		}
		if !byEvent { // neither event nor idle comes: the deadline is the caller's
			cancel()
		}
		err := await(t, "waiter", turn)
		if want := map[bool]error{true: ErrAborted, false: context.Canceled}[byEvent]; !errors.Is(err, want) {
			t.Errorf("SendAndWait: %v, want %v", err, want)
		}
		cancel()
		if err := s.Disconnect(testContext(t)); err != nil {
			t.Error(err)
		}
		if n := len(p.calls("session.abort")); n != 1 {
			t.Errorf("%d aborts, Disconnect must send none", n)
		}
	}
}

// TestAbortOfSubagent ends the calls of that agent only.
func TestAbortOfSubagent(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	s := createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: b.tool}}})
	data := map[string]any{"requestId": "r1", "toolName": "t", "toolCallId": "c"}
	p.emit("s", "external_tool.requested", data)
	main := await(t, "main agent's tool", b.begun)
	data["requestId"] = "r2"
	p.emit("s", "external_tool.requested", data, "agentId", "a")
	sub := await(t, "sub-agent's tool", b.begun)
	p.emit("s", "abort", nil, "agentId", "a")
	await(t, "sub-agent's tool", sub.Done())
	p.sync()
	if main.Err() != nil {
		t.Error("the main agent's tool ended with it")
	}
	p.emit("s", "abort", nil)
	await(t, "main agent's tool", main.Done())
	_ = s
}

// TestCase047ConnectionLost: handlers learn of the connection's end, and nobody waits for one that does not heed it.
func TestCase047ConnectionLost(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	deaf, asked := make(chan struct{}), make(chan struct{})
	returned := make(chan struct{})
	createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: b.tool}},
		OnUserInput: func(context.Context, UserInputRequest) (UserInputResponse, error) {
			defer close(returned)
			close(asked)
			<-deaf
			return UserInputResponse{}, nil
		}})
	p.askTool("s", "r")
	await(t, "tool", b.begun)
	p.ask("userInput.request", map[string]any{"sessionId": "s", "question": "q"})
	await(t, "question", asked)
	p.conn.Close()
	if cause := await(t, "tool's context", b.causes); !errors.Is(cause, io.ErrUnexpectedEOF) {
		t.Errorf("cause is %v", cause)
	}
	await(t, "client's end", c.Done())
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	close(deaf)
	await(t, "deaf handler", returned)
}

// TestCase028AnswerAfterIdle: the turn's end takes no answer away; one that comes when the client has stopped harms nobody.
func TestCase028AnswerAfterIdle(t *testing.T) {
	leakCheck(t)
	var log hdlLog
	c, p := newPeer(t, &Options{Logger: log.logger()})
	b := newHdlBlock()
	late, lateBegun := make(chan struct{}), make(chan context.Context, 1)
	s := createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: b.tool}, {Name: "deaf", Handler: func(ctx context.Context, _ ToolCall) (ToolResult, error) {
		lateBegun <- ctx
		<-late
		return ToolResult{}, nil
	}}}})
	p.askTool("s", "r1")
	await(t, "tool", b.begun)
	p.emit("s", "session.idle", map[string]any{})
	p.sync()
	close(b.release)
	if got := p.wait(hdlTool, 1); got.get("result") != "done" {
		t.Errorf("answered %s", got.Params)
	}
	p.emit("s", "external_tool.requested", map[string]any{"requestId": "r2", "toolName": "deaf", "toolCallId": "c"})
	ctx := await(t, "deaf tool", lateBegun)
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	s.tasks.mu.Lock()
	last := s.tasks.byKey["external_tool r2"]
	s.tasks.mu.Unlock()
	close(late)
	await(t, "deaf tool's context", ctx.Done())
	for c.agentWork.busy() { // its answer has nowhere to go
		runtime.Gosched()
	}
	if !last.settled.Load() || strings.Contains(log.String(), "panic") {
		t.Errorf("the late answer was not dropped quietly:\n%s", log.String())
	}
}

func (l *limiter) busy() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running > 0
}

// TestCase049HandlersCallBack: everything may be called from everywhere.
func TestCase049HandlersCallBack(t *testing.T) {
	leakCheck(t)
	places := map[string]func(p *peer, call func() error, cfg *SessionConfig) (trigger func()){
		"tool": func(p *peer, call func() error, cfg *SessionConfig) func() {
			cfg.Tools = []Tool{{Name: "t", Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{}, call() }}}
			return func() { p.askTool("s", "r") }
		},
		"permission": func(p *peer, call func() error, cfg *SessionConfig) func() {
			cfg.OnPermission = func(context.Context, PermissionRequest) (PermissionDecision, error) { return ApproveOnce(), call() }
			return func() { p.askPermission("s", "r") }
		},
		"hook": func(p *peer, call func() error, cfg *SessionConfig) func() {
			cfg.OnHook = func(context.Context, HookCall) (any, error) { return nil, call() }
			return func() { p.ask("hooks.invoke", map[string]any{"sessionId": "s", "hookType": "agentStop"}) }
		},
		"question": func(p *peer, call func() error, cfg *SessionConfig) func() {
			cfg.OnUserInput = func(context.Context, UserInputRequest) (UserInputResponse, error) { return UserInputResponse{}, call() }
			return func() { p.ask("userInput.request", map[string]any{"sessionId": "s", "question": "q"}) }
		},
		"notification": func(p *peer, call func() error, cfg *SessionConfig) func() {
			cfg.Handlers = map[string]HandlerFunc{"x.notice": func(context.Context, string, json.RawMessage) (any, error) { return nil, call() }}
			return func() { p.send(notification("x.notice", map[string]any{"sessionId": "s"})) }
		},
		"event loop": func(p *peer, call func() error, cfg *SessionConfig) func() { return nil },
	}
	for name, place := range places {
		for _, last := range []string{"Disconnect", "Stop", "ForceStop"} {
			t.Run(name+"/"+last, func(t *testing.T) {
				c, p := newPeer(t, nil)
				started := make(chan *Session, 1)
				done := make(chan error, 1)
				call := func() error {
					s := <-started
					ctx := testContext(t)
					_, err := s.Send(ctx, Message{Prompt: "x"})
					_, errHistory := s.History(ctx)
					other, errOther := c.CreateSession(ctx, nil)
					if errOther == nil {
						errOther = other.Disconnect(ctx)
					}
					sub := s.Subscribe()
					sub.Close()
					err = errors.Join(err, errHistory, errOther, s.Abort(ctx))
					switch last {
					case "Disconnect":
						err = errors.Join(err, s.Disconnect(ctx))
					case "Stop":
						err = errors.Join(err, c.Stop(ctx))
					case "ForceStop":
						c.ForceStop()
					}
					done <- err
					return nil
				}
				cfg := &SessionConfig{SessionID: "s"}
				trigger := place(p, call, cfg)
				s := createSession(t, c, cfg)
				started <- s
				if trigger != nil {
					trigger()
				} else {
					sub := s.Subscribe()
					p.emit("s", "session.idle", map[string]any{})
					for range sub.All(testContext(t)) {
						_ = call()
						break
					}
					sub.Close()
				}
				if err := await(t, "calls", done); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// TestCase050QuestionHoldsNothingUp: a question is open for as long as the user likes; events and other sessions go on.
func TestCase050QuestionHoldsNothingUp(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	ask := func(ctx context.Context, r UserInputRequest) (UserInputResponse, error) {
		return UserInputResponse{Answer: r.SessionID}, b.wait(ctx)
	}
	s := createSession(t, c, &SessionConfig{SessionID: "s1", OnUserInput: ask})
	createSession(t, c, &SessionConfig{SessionID: "s2", OnUserInput: ask})
	sub := s.Subscribe()
	defer sub.Close()
	one := p.ask("userInput.request", map[string]any{"sessionId": "s1", "question": "q"})
	ctx := await(t, "first question", b.begun)
	for i := range 50 {
		p.emit("s1", "session.info", map[string]any{"n": i})
	}
	for i := range 50 {
		if e := next(t, sub); string(member(e.Data, "n")) != fmt.Sprint(i) {
			t.Fatalf("event %d is %s", i, e.Data)
		}
	}
	two := p.ask("userInput.request", map[string]any{"sessionId": "s2", "question": "q"})
	await(t, "second question", b.begun)
	if _, limited := ctx.Deadline(); limited || ctx.Err() != nil {
		t.Error("the library limits how long a user may think")
	}
	close(b.release)
	for name, c := range map[string]<-chan peerMessage{"s1": one, "s2": two} {
		if got, want := hdlOutcome(t, await(t, "answer", c)), fmt.Sprintf(`{"answer":%q,"wasFreeform":true}`, name); got != want {
			t.Errorf("answered %s, want %s", got, want)
		}
	}
}

// TestCase077LongApproval: no clock of ours runs while a human decides.
func TestCase077LongApproval(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: b.permission})
	p.askPermission("s", "r")
	if _, limited := await(t, "handler", b.begun).Deadline(); limited {
		t.Error("the handler's context has a deadline")
	}
	p.sync()
	close(b.release)
	if got, want := string(p.wait(hdlPermission, 1).Params), `{"requestId":"r","result":{"kind":"approve-once"},"sessionId":"s"}`; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
}

// TestCase076SecondAnswer: somebody else was first, which is no error.
func TestCase076SecondAnswer(t *testing.T) {
	leakCheck(t)
	var log hdlLog
	c, p := newPeer(t, &Options{Logger: log.logger()})
	p.handle(hdlPermission, func(*peer, peerMessage) any { return map[string]any{"success": false} })
	s := createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: ApproveAll})
	p.askPermission("s", "r")
	p.wait(hdlPermission, 1)
	hdlQuiet(t, p, s)
	if n := len(p.calls(hdlPermission)); n != 1 {
		t.Errorf("answered %d times", n)
	}
	if text := log.String(); !strings.Contains(text, "came too late") || strings.Contains(text, "WARN") || strings.Contains(text, "ERROR") {
		t.Errorf("log:\n%s", text)
	}
}

// TestRefusedAnswer: an answer that the server does not take is replaced once, so that nothing is pending for ever.
func TestRefusedAnswer(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	for _, method := range []string{hdlTool, hdlPermission, hdlElicit} {
		p.refuse(method, codeInvalidParams, "no")
	}
	s := createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: ApproveAll,
		Tools: []Tool{{Name: "t", Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{}, nil }}},
		OnElicitation: func(context.Context, ElicitationRequest) (ElicitationResult, error) {
			return ElicitationResult{Action: ElicitationAccept}, nil
		}})
	p.askTool("s", "r")
	p.askPermission("s", "r")
	p.emit("s", "elicitation.requested", map[string]any{"requestId": "r", "message": "m"})
	for method, want := range map[string]string{hdlTool: `"resultType":"failure"`, hdlPermission: `"user-not-available"`, hdlElicit: `"cancel"`} {
		if got := p.wait(method, 2); !bytes.Contains(got.Params, []byte(want)) {
			t.Errorf("second answer %s, want %s", got.Params, want)
		}
	}
	hdlQuiet(t, p, s)
	for _, method := range []string{hdlTool, hdlPermission, hdlElicit} {
		if n := len(p.calls(method)); n != 2 {
			t.Errorf("%s was called %d times", method, n)
		}
	}
}

func TestCancelRequest(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{}})
	b := newHdlBlock()
	c.opts.Handlers["installations.confirm"] = func(ctx context.Context, _ string, _ json.RawMessage) (any, error) { return "confirmed", b.wait(ctx) }
	answer := p.ask("installations.confirm", map[string]any{})
	ctx := await(t, "handler", b.begun)
	p.send(notification("$/cancelRequest", map[string]any{"id": 99}), notification("$/cancelRequest", map[string]any{}), notification("$/cancelRequest", nil))
	p.sync()
	if ctx.Err() != nil {
		t.Fatal("another request's cancellation ended it")
	}
	p.send(notification("$/cancelRequest", map[string]any{"id": 1}))
	if got, want := hdlOutcome(t, await(t, "answer", answer)), "error -32800 cancelled"; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
	if cause := await(t, "handler's context", b.causes); !errors.Is(cause, errCancelled) {
		t.Errorf("cause is %v", cause)
	}
	// No second answer: one would belong to no request of the peer's, so look at the wire's order.
	await(t, "handler's end", ctx.Done())
	for c.agentWork.busy() {
		runtime.Gosched()
	}
	p.sync()
	p.mu.Lock()
	defer p.mu.Unlock()
	answers := 0
	for _, m := range p.seen {
		if m.Method == "" && string(m.ID) == "1" {
			answers++
		}
	}
	if answers != 1 {
		t.Errorf("%d answers", answers)
	}
}

// TestCustomHandlers serves what this package does not know, and what it does in the host's own way.
func TestCustomHandlers(t *testing.T) {
	leakCheck(t)
	notices := make(chan string, 1)
	reply := func(result any, err error) HandlerFunc {
		return func(context.Context, string, json.RawMessage) (any, error) { return result, err }
	}
	c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{
		"x.client": reply("client", nil),
		"x.both":   reply("client", nil),
		"x.nil":    reply(nil, nil),
		"x.error":  reply(nil, errors.New("boom")),
		"x.code":   reply(nil, fmt.Errorf("wrapped: %w", &RPCError{Code: -7, Message: "seven", Data: json.RawMessage(`{"a":1}`)})),
		"x.data":   reply(nil, &RPCError{Code: -7, Message: "seven", Data: json.RawMessage(`{`)}),
		"x.chan":   reply(make(chan int), nil),
		"x.panic":  func(context.Context, string, json.RawMessage) (any, error) { panic("bang") },
		"x.exit":   func(context.Context, string, json.RawMessage) (any, error) { runtime.Goexit(); return nil, nil },
		"x.echo": func(_ context.Context, method string, params json.RawMessage) (any, error) {
			return []any{method, params}, nil
		},
		"x.notice": func(_ context.Context, method string, params json.RawMessage) (any, error) {
			notices <- method + " " + string(params)
			return nil, nil
		},
	}})
	createSession(t, c, &SessionConfig{SessionID: "s", Handlers: map[string]HandlerFunc{
		"x.both": reply("session", nil), "x.session": reply("session", nil), "hooks.invoke": reply("own", nil)}})
	for _, tc := range []struct{ method, params, want string }{
		{"x.client", `{}`, `"client"`},
		{"x.client", `{"sessionId":"s"}`, `"client"`},
		{"x.client", `{"sessionId":"nobody"}`, `"client"`},
		{"x.both", `{"sessionId":"s"}`, `"session"`},
		{"x.both", `{}`, `"client"`},
		{"x.session", `{"sessionId":"s"}`, `"session"`},
		{"x.session", `{}`, `error -32601 method not found: x.session`},
		{"hooks.invoke", `{"sessionId":"s"}`, `"own"`},
		{"x.nil", `{}`, `null`},
		{"x.error", `{}`, `error -32603 boom`},
		{"x.code", `{}`, `error -7 seven{"a":1}`},
		{"x.data", `{}`, `error -7 seven`},
		{"x.chan", `{}`, `error -32603 the result cannot be encoded`},
		{"x.panic", `{}`, `error -32603 the host's handler panicked`},
		{"x.exit", `{}`, `error -32603 the host's handler panicked`},
		{"x.echo", `{"n":12345678901234567890}`, `["x.echo",{"n":12345678901234567890}]`},
		{"x.unknown", `{}`, `error -32601 method not found: x.unknown`},
	} {
		if got := hdlOutcome(t, p.request(tc.method, json.RawMessage(tc.params))); got != tc.want {
			t.Errorf("%s %s: answered %s, want %s", tc.method, tc.params, got, tc.want)
		}
	}
	p.send(notification("x.unknown", nil), notification("x.notice", map[string]any{"a": 1}))
	if got := await(t, "notice", notices); got != `x.notice {"a":1}` {
		t.Errorf("got %s", got)
	}
}

// TestMaxHandlers: at most that many run, the others wait in order; neither the reader nor the other class waits with them.
func TestMaxHandlers(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, &Options{MaxHandlers: 2})
	begun, release := make(chan string, 8), make(chan struct{})
	s := createSession(t, c, &SessionConfig{SessionID: "s",
		OnHook: func(context.Context, HookCall) (any, error) { return nil, nil },
		Tools: []Tool{{Name: "t", Handler: func(_ context.Context, c ToolCall) (ToolResult, error) {
			begun <- c.RequestID
			<-release
			return ToolResult{}, nil
		}}}})
	sub := s.Subscribe()
	defer sub.Close()
	for i := range 6 {
		p.askTool("s", fmt.Sprint("r", i))
	}
	p.emit("s", "session.info", map[string]any{})
	for range 7 {
		next(t, sub)
	}
	first := map[string]bool{await(t, "first", begun): true, await(t, "second", begun): true}
	if !first["r0"] || !first["r1"] {
		t.Errorf("began with %v", first)
	}
	p.request("hooks.invoke", map[string]any{"sessionId": "s", "hookType": "agentStop"}) // the other class
	p.request("userInput.request", map[string]any{"sessionId": "s", "question": "q"})    // needs no handler
	// One that is resolved while it waits never begins; one that is aborted while it waits is answered without its handler.
	p.emit("s", "external_tool.completed", map[string]any{"requestId": "r3"})
	p.sync()
	if len(begun) != 0 {
		t.Fatalf("%s began beyond the limit", <-begun)
	}
	for _, want := range []string{"r2", "r4", "r5"} {
		release <- struct{}{}
		if got := await(t, want, begun); got != want {
			t.Errorf("%s began, want %s", got, want)
		}
	}
	p.askTool("s", "r6")
	p.sync()
	p.emit("s", "abort", map[string]any{})
	p.sync()
	close(release)
	answers := make(map[string]string)
	for i := range 6 {
		m := p.wait(hdlTool, i+1)
		answers[m.get("requestId").(string)] = string(m.Params)
	}
	hdlQuiet(t, p, s)
	if n := len(p.calls(hdlTool)); n != 6 || answers["r3"] != "" || !strings.Contains(answers["r6"], ErrAborted.Error()) || len(begun) != 0 {
		t.Errorf("%d answers, %d late calls: %v", n, len(begun), answers)
	}
}

// TestHandlerFlood: a peer that asks without end ends the connection, not the memory.
func TestHandlerFlood(t *testing.T) {
	leakCheck(t)
	l := limiter{max: 1}
	release := make(chan struct{})
	order := make(chan int, maxWaiting+1)
	l.run(func() { <-release })
	for i := range maxWaiting {
		if !l.run(func() { order <- i }) {
			t.Fatalf("call %d was refused", i)
		}
	}
	if l.run(func() {}) {
		t.Error("a call beyond the limit was taken")
	}
	close(release)
	ctx := testContext(t)
	for i := range maxWaiting {
		select {
		case got := <-order:
			if got != i {
				t.Fatalf("call %d came as number %d", got, i)
			}
		case <-ctx.Done():
			t.Fatalf("call %d did not come", i)
		}
	}

	c, p := newPeer(t, &Options{MaxHandlers: 1})
	b := newHdlBlock()
	createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: b.tool}}})
	p.askTool("s", "r0")
	await(t, "tool", b.begun)
	c.agentWork.mu.Lock()
	c.agentWork.waiting = make([]func(), maxWaiting)
	for i := range c.agentWork.waiting {
		c.agentWork.waiting[i] = func() {}
	}
	c.agentWork.mu.Unlock()
	p.askTool("s", "r1")
	await(t, "client's end", c.Done())
	if err := c.Err(); !errors.Is(err, errFlood) {
		t.Errorf("ended with %v", err)
	}
}

// TestHandlersDuringStart: what the server asks before it has answered the start is served.
func TestHandlersDuringStart(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("session.create", func(p *peer, m peerMessage) any {
		go func() {
			p.request("hooks.invoke", map[string]any{"sessionId": "s", "hookType": "sessionStart"})
			p.askPermission("s", "r")
			p.wait(hdlPermission, 1)
			p.answer(m.ID, map[string]any{"sessionId": "s"})
		}()
		return noAnswer
	})
	hooked := make(chan struct{}, 1)
	createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: ApproveAll, OnHook: func(context.Context, HookCall) (any, error) {
		hooked <- struct{}{}
		return nil, nil
	}})
	await(t, "hook", hooked)
}

// TestSessionEndHook: the server asks it while the release is on its way, and waits for it.
func TestSessionEndHook(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	s := createSession(t, c, &SessionConfig{SessionID: "s", Hooks: &Hooks{SessionEnd: func(ctx context.Context, in SessionEndInput) (SessionEndOutput, error) {
		return SessionEndOutput{SessionSummary: "sum"}, b.wait(ctx)
	}}})
	answers := make(chan string, 1)
	p.handle("session.destroy", func(p *peer, m peerMessage) any {
		go func() {
			answer := p.request("hooks.invoke", map[string]any{"sessionId": "s", "hookType": "sessionEnd", "input": map[string]any{}})
			answers <- string(answer.Result)
			p.answer(m.ID, map[string]any{"success": true})
		}()
		return noAnswer
	})
	left := async(func() error { return s.Disconnect(testContext(t)) })
	if ctx := await(t, "hook", b.begun); ctx.Err() != nil {
		t.Errorf("its context has ended: %v", context.Cause(ctx))
	}
	close(b.release)
	if got, want := await(t, "hook's answer", answers), `{"output":{"sessionSummary":"sum"}}`; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
	if err := await(t, "Disconnect", left); err != nil {
		t.Error(err)
	}
}

// TestQuestionAnsweredElsewhere: the server tells of the end of a question without naming its request.
func TestQuestionAnsweredElsewhere(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	s := createSession(t, c, &SessionConfig{SessionID: "s",
		OnUserInput: func(ctx context.Context, _ UserInputRequest) (UserInputResponse, error) {
			return UserInputResponse{}, b.wait(ctx)
		},
		OnExitPlanMode: func(context.Context, ExitPlanModeRequest) (ExitPlanModeResult, error) {
			return ExitPlanModeResult{Approved: true}, nil
		}})
	question := map[string]any{"sessionId": "s", "question": "q"}
	completed := func() { p.emit("s", "user_input.completed", map[string]any{"requestId": "r"}); p.sync() }
	one := p.ask("userInput.request", question)
	await(t, "question", b.begun)
	p.request("exitPlanMode.request", map[string]any{"sessionId": "s"})
	p.emit("s", "exit_plan_mode.completed", map[string]any{"requestId": "plan"}) // another topic
	p.sync()
	two := p.ask("userInput.request", question)
	await(t, "second question", b.begun)
	completed() // of either
	if len(b.causes) != 0 {
		t.Fatal("a question was ended though nobody can tell which one was answered")
	}
	b.release <- struct{}{}
	b.release <- struct{}{}
	await(t, "answer", one)
	await(t, "answer", two)
	completed()
	completed() // of our own answers
	three := p.ask("userInput.request", question)
	await(t, "third question", b.begun)
	completed()
	if cause := await(t, "handler's context", b.causes); !errors.Is(cause, errResolved) {
		t.Errorf("cause is %v", cause)
	}
	if got, want := hdlOutcome(t, await(t, "answer", three)), `{"noResponse":true}`; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
	_ = s
}

// TestTraceContext follows a trace from a tool call into what its handler calls.
func TestTraceContext(t *testing.T) {
	leakCheck(t)
	for _, tc := range []struct {
		name  string
		opts  *Options
		m     Message
		trace string // of the message
	}{
		{"handler's", nil, Message{}, "00-a-b-01 k=v"},
		{"message's own", nil, Message{Traceparent: "own"}, "own <nil>"},
		{"option", &Options{TraceContext: func(context.Context) (string, string) { return "option", "" }}, Message{}, "option <nil>"},
		{"option says none", &Options{TraceContext: func(context.Context) (string, string) { return "", "" }}, Message{}, "<nil> <nil>"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, p := newPeer(t, tc.opts)
			started := make(chan *Session, 1)
			createTool := Tool{Name: "t", Handler: func(ctx context.Context, _ ToolCall) (ToolResult, error) {
				s := <-started
				if _, err := s.Send(ctx, tc.m); err != nil {
					return ToolResult{}, err
				}
				_, err := c.CreateSession(ctx, nil)
				return ToolResult{}, err
			}}
			started <- createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{createTool}})
			p.emit("s", "external_tool.requested", map[string]any{"requestId": "r", "toolName": "t", "toolCallId": "c", "traceparent": "00-a-b-01", "tracestate": "k=v"})
			if got := p.wait(hdlTool, 1); got.get("result") != "" {
				t.Fatalf("tool: %s", got.Params)
			}
			of := func(m peerMessage) string { return fmt.Sprint(m.get("traceparent"), " ", m.get("tracestate")) }
			if got := of(p.wait("session.send", 1)); got != tc.trace {
				t.Errorf("the message carries %s, want %s", got, tc.trace)
			}
			if got := of(p.wait("session.create", 2)); tc.m.Traceparent == "" && got != tc.trace {
				t.Errorf("the new session carries %s, want %s", got, tc.trace)
			}
		})
	}
	if parent, state := TraceContextFrom(context.Background()); parent != "" || state != "" {
		t.Errorf("a ctx without trace has %q %q", parent, state)
	}
}

// TestCase057PanicsStayAtHome: a handler's panic goes to the log, with its stack, and takes nothing else along; one in a loop over events is its
// goroutine's own.
func TestCase057PanicsStayAtHome(t *testing.T) {
	leakCheck(t)
	var log hdlLog
	c, p := newPeer(t, &Options{Logger: log.logger()})
	s := createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: func(context.Context, PermissionRequest) (PermissionDecision, error) { panic("bang") }})
	sub, other := s.Subscribe(), s.Subscribe()
	defer other.Close()
	p.askPermission("s", "r")
	p.wait(hdlPermission, 1)
	func() {
		defer func() {
			if got := recover(); got != "loop" {
				t.Errorf("recovered %v", got)
			}
			sub.Close()
		}()
		for range sub.All(testContext(t)) {
			panic("loop")
		}
	}()
	if e := next(t, other); e.Type != EventPermissionRequested {
		t.Errorf("got %s", e.Type)
	}
	hdlQuiet(t, p, s)
	if text := log.String(); !strings.Contains(text, "bang") || !strings.Contains(text, "TestCase057") {
		t.Errorf("log:\n%s", text)
	}
}

// TestCase084NotLoggedIn: the same error from all that may tell.
func TestCase084NotLoggedIn(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("auth.getStatus", func(*peer, peerMessage) any {
		return map[string]any{"isAuthenticated": false, "statusMessage": "run login"}
	})
	status, err := c.AuthStatus(testContext(t))
	if err = errors.Join(err, status.Err()); !errors.Is(err, ErrAuthentication) || !strings.Contains(err.Error(), "run login") {
		t.Errorf("status: %v", err)
	}
	if err := (AuthStatus{IsAuthenticated: true}).Err(); err != nil {
		t.Errorf("logged in: %v", err)
	}
	s := createSession(t, c, nil)
	turn := async(func() error { _, err := s.SendAndWait(testContext(t), Message{}); return err })
	p.wait("session.send", 1)
	p.sync()
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m1"})
	p.emit(s.ID(), "session.error", map[string]any{"errorType": "authentication", "message": "bad key", "statusCode": 401})
	if err := await(t, "turn", turn); !errors.Is(err, ErrAuthentication) || !strings.Contains(err.Error(), "bad key") {
		t.Errorf("turn: %v", err)
	}
	p.refuse("session.create", codeInternal, "Not authenticated")
	if _, err := c.CreateSession(testContext(t), nil); !errors.Is(err, ErrAuthentication) || !strings.Contains(err.Error(), "Not authenticated") {
		t.Errorf("create: %v", err)
	}
}

// TestCase074NameClash: two tools of one name are refused before any traffic; the override is sent when it is set.
func TestCase074NameClash(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	if _, err := c.CreateSession(testContext(t), &SessionConfig{Tools: []Tool{{Name: "t"}, {Name: "t"}}}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("got %v", err)
	}
	if _, err := c.CreateSession(testContext(t), &SessionConfig{Tools: []Tool{{Name: ""}}}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("empty name: got %v", err)
	}
	if n := len(p.calls("session.create")); n != 0 {
		t.Errorf("%d requests were written", n)
	}
	createSession(t, c, &SessionConfig{Tools: []Tool{{Name: "bash", OverridesBuiltIn: true}, {Name: "t"}}})
	const none = `"parameters":{"type":"object","properties":{}}`
	want := `[{"name":"bash",` + none + `,"overridesBuiltInTool":true},{"name":"t",` + none + `}]`
	if got := string(member(p.wait("session.create", 1).Params, "tools")); got != want {
		t.Errorf("sent %s, want %s", got, want)
	}
}

// TestPermissionApproval: what a request would let pass from now on, as the server wants it.
func TestPermissionApproval(t *testing.T) {
	for _, tc := range []struct {
		request PermissionRequest
		want    string
	}{
		{PermissionRequest{Kind: PermissionShell, Commands: []PermissionCommand{{Identifier: "ls"}, {Identifier: "cat"}}}, `{"commandIdentifiers":["ls","cat"],"kind":"commands"}`},
		{PermissionRequest{Kind: PermissionRead, Path: "x"}, `{"kind":"read"}`},
		{PermissionRequest{Kind: PermissionWrite}, `{"kind":"write"}`},
		{PermissionRequest{Kind: PermissionMemory}, `{"kind":"memory"}`},
		{PermissionRequest{Kind: PermissionMCP, ServerName: "m", ToolName: "t"}, `{"kind":"mcp","serverName":"m","toolName":"t"}`},
		{PermissionRequest{Kind: PermissionCustomTool, ToolName: "t"}, `{"kind":"custom-tool","toolName":"t"}`},
		{PermissionRequest{Kind: PermissionExtension, Operation: "o"}, `{"kind":"extension-management","operation":"o"}`},
		{PermissionRequest{Kind: PermissionWorkflow, ApprovalKey: "k"}, `{"approvalKey":"k","kind":"workflow"}`},
		{PermissionRequest{Kind: PermissionExtensionAccess, ExtensionName: "e"}, `{"extensionName":"e","kind":"extension-permission-access"}`},
		{PermissionRequest{Kind: PermissionExtensionEnv, ExtensionName: "e", EnvironmentVariables: []string{"V"}}, `{"environmentVariables":["V"],"extensionName":"e","kind":"extension-env-access"}`},
		{PermissionRequest{Kind: PermissionURL}, ``},
		{PermissionRequest{Kind: "future"}, ``},
	} {
		raw, err := json.Marshal(ApproveForSession(tc.request.Approval()))
		if got := string(member(raw, "approval")); err != nil || got != tc.want {
			t.Errorf("%s: %s, %v, want %s", tc.request.Kind, got, err, tc.want)
		}
	}
	for _, d := range []PermissionDecision{{}, NoResult(), ApproveForLocation(PermissionApproval{Kind: "mcp"}, "k")} {
		if raw, err := json.Marshal(d); err == nil {
			t.Errorf("%+v encodes as %s", d, raw)
		}
	}
}

// TestLateToolAnswer: what a handler could not say, the host says later by a call of its own.
func TestLateToolAnswer(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, &SessionConfig{SessionID: "s"})
	ctx := testContext(t)
	if err := s.Call(ctx, hdlTool, map[string]any{"requestId": "r", "result": ToolResult{Text: "x"}}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Call(ctx, hdlPermission, map[string]any{"requestId": "r", "result": Reject("no")}, nil); err != nil {
		t.Fatal(err)
	}
	for method, want := range map[string]string{hdlTool: `{"textResultForLlm":"x"}`, hdlPermission: `{"feedback":"no","kind":"reject"}`} {
		if got := string(member(p.wait(method, 1).Params, "result")); got != want {
			t.Errorf("%s: sent %s, want %s", method, got, want)
		}
	}
}

func TestMCPAuthDoesNotPrintSecrets(t *testing.T) {
	r := MCPAuthRequest{ServerName: "srv", Client: &MCPAuthClient{ClientID: "id", ClientSecret: "hush-hush"},
		Response: &MCPAuthHTTPResponse{StatusCode: 401, Headers: []MCPAuthHeader{{"X-Key", "hush-hush"}}}}
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("%v %+v %#v %s %s %+v %+v %+v", r, r, r, &r, raw, *r.Client, r.Response.Headers, r.Response)
	if strings.Contains(text, "hush") || !strings.Contains(text, "srv") {
		t.Errorf("prints %s", text)
	}
}

type (
	hdlColor  string
	hdlText   struct{ a, b int }
	hdlCustom struct{ X int }
	hdlNode   struct {
		Name string             `json:"name"`
		Kids []*hdlNode         `json:"kids,omitempty"`
		By   map[string]hdlNode `json:"by,omitempty"`
	}
	hdlTree struct {
		Root  hdlNode      `json:"root"`
		Other hdlPair[int] `json:"other"`
	}
	hdlPair[T any] struct {
		Value T           `json:"value"`
		Next  *hdlPair[T] `json:"next"`
	}
	hdlLoop     []hdlLoop
	hdlPointer  *hdlPointer
	HdlEmbedded struct {
		Inner  int
		Hidden int `json:"shared"`
	}
	HdlDeep struct {
		HdlEmbedded
		Twice int
	}
	hdlLower struct{ Promoted int }
)

func (hdlText) MarshalText() ([]byte, error)  { return nil, nil }
func (*hdlText) UnmarshalText([]byte) error   { return nil }
func (*hdlCustom) UnmarshalJSON([]byte) error { return nil }

func TestSchemaFor(t *testing.T) {
	for _, tc := range []struct {
		name string
		got  func() (json.RawMessage, error)
		want string
	}{
		{"empty", SchemaFor[struct{}], `{"type":"object","properties":{}}`},
		{"kinds", SchemaFor[struct {
			S string
			B bool
			I int8
			U uint64
			F float32
			N json.Number
			A any
			R json.RawMessage
			D time.Duration
		}], `{"type":"object","properties":{"S":{"type":"string"},"B":{"type":"boolean"},"I":{"type":"integer"},"U":{"type":"integer"},"F":{"type":"number"},"N":{"type":"number"},"A":{},"R":{},"D":{"type":"integer"}},"required":["S","B","I","U","F","N","A","R","D"]}`},
		{"tags", SchemaFor[struct {
			A int  `json:"a" description:"the <first>"`
			B int  `json:"b,omitempty"`
			C *int `json:"c"`
			D int  `json:"-"`
			E int  `json:"-,"`
			F int  `json:",string"`
			G int  `json:"g,omitzero"`
			h int
			K hdlColor `enum:"red,blue" json:"k"`
			L []int    `enum:"1,2" json:"l"`
			M *float64 `enum:"1.5" json:"m"`
			O int      `json:"o,string" enum:"1,2"`
		}], `{"type":"object","properties":{"a":{"type":"integer","description":"the <first>"},"b":{"type":"integer"},"c":{"type":"integer"},"-":{"type":"integer"},"F":{"type":"string"},"g":{"type":"integer"},"k":{"type":"string","enum":["red","blue"]},"l":{"type":"array","items":{"type":"integer","enum":[1,2]}},"m":{"type":"number","enum":[1.5]},"o":{"type":"string","enum":["1","2"]}},"required":["a","-","F","k","l","o"]}`},
		{"lists", SchemaFor[struct {
			A []string
			B [2]bool
			C []byte
			D map[string]int
			E map[int][]string
			F map[hdlText]bool
		}], `{"type":"object","properties":{"A":{"type":"array","items":{"type":"string"}},"B":{"type":"array","items":{"type":"boolean"},"minItems":2,"maxItems":2},"C":{"type":"string","contentEncoding":"base64"},"D":{"type":"object","additionalProperties":{"type":"integer"}},"E":{"type":"object","additionalProperties":{"type":"array","items":{"type":"string"}}},"F":{"type":"object","additionalProperties":{"type":"boolean"}}},"required":["A","B","C","D","E","F"]}`},
		{"own forms", SchemaFor[struct {
			T time.Time
			P *time.Time
			X hdlText
			J hdlCustom
			B *big.Int
		}], `{"type":"object","properties":{"T":{"type":"string","format":"date-time"},"P":{"type":"string","format":"date-time"},"X":{"type":"string"},"J":{},"B":{}},"required":["T","X","J"]}`},
		{"embedded", SchemaFor[struct {
			HdlDeep
			*HdlEmbedded
			hdlLower
			Named  hdlLower
			Shared int `json:"shared"`
		}], `{"type":"object","properties":{"Twice":{"type":"integer"},"Inner":{"type":"integer"},"Promoted":{"type":"integer"},"Named":{"type":"object","properties":{"Promoted":{"type":"integer"}},"required":["Promoted"]},"shared":{"type":"integer"}},"required":["Twice","Promoted","Named","shared"]}`},
		{"recursive root", SchemaFor[*hdlNode], `{"type":"object","properties":{"name":{"type":"string"},"kids":{"type":"array","items":{"$ref":"#"}},"by":{"type":"object","additionalProperties":{"$ref":"#"}}},"required":["name"]}`},
		{"recursive inside", SchemaFor[hdlTree], `{"type":"object","properties":{"root":{"$ref":"#/$defs/hdlNode"},"other":{"$ref":"#/$defs/hdlPair_int_"}},"required":["root","other"],"$defs":{"hdlNode":{"type":"object","properties":{"name":{"type":"string"},"kids":{"type":"array","items":{"$ref":"#/$defs/hdlNode"}},"by":{"type":"object","additionalProperties":{"$ref":"#/$defs/hdlNode"}}},"required":["name"]},"hdlPair_int_":{"type":"object","properties":{"value":{"type":"integer"},"next":{"$ref":"#/$defs/hdlPair_int_"}},"required":["value"]}}}`},
		{"recursive list", SchemaFor[hdlLoop], `{"type":"array","items":{"$ref":"#"}}`},
		{"scalar", SchemaFor[**string], `{"type":"string"}`},
	} {
		got, err := tc.got()
		if err != nil || string(got) != tc.want {
			t.Errorf("%s: %v\n got %s\nwant %s", tc.name, err, got, tc.want)
		}
	}
	for name, f := range map[string]func() (json.RawMessage, error){
		"chan":              SchemaFor[chan int],
		"func in a list":    SchemaFor[struct{ F []func() }],
		"complex":           SchemaFor[map[string]complex128],
		"map key":           SchemaFor[map[bool]int],
		"interface":         SchemaFor[struct{ R io.Reader }],
		"pointer to itself": SchemaFor[hdlPointer],
		"enum of objects": SchemaFor[struct {
			X hdlLower `enum:"a"`
		}],
		"enum no number": SchemaFor[struct {
			X int `enum:"a"`
		}],
	} {
		if raw, err := f(); !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("%s: %s, %v", name, raw, err)
		}
	}
}

// TestNewToolBadType: a tool that cannot be declared is found out before anything is written.
func TestNewToolBadType(t *testing.T) {
	leakCheck(t)
	c, _ := newPeer(t, nil)
	for name, tool := range map[string]Tool{
		"no schema": NewTool("t", "", func(context.Context, struct{ C chan int }) (string, error) { return "", nil }),
		"no object": NewTool("t", "", func(context.Context, string) (string, error) { return "", nil }),
		"list":      NewTool("t", "", func(context.Context, []int) (string, error) { return "", nil }),
	} {
		if _, err := c.PrepareSession(&SessionConfig{Tools: []Tool{tool}}); !errors.Is(err, ErrInvalidConfig) || !strings.Contains(err.Error(), "Tools[0]") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, tool := range map[string]Tool{
		"any":     NewTool("t", "", func(context.Context, any) (string, error) { return "", nil }),
		"raw":     NewTool("t", "", func(context.Context, json.RawMessage) (string, error) { return "", nil }),
		"map":     NewTool("t", "", func(context.Context, map[string]any) (string, error) { return "", nil }),
		"pointer": NewTool("t", "", func(context.Context, *hdlNode) (string, error) { return "", nil }),
		"no func": NewTool[struct{}, string]("t", "", nil),
	} {
		if _, err := c.PrepareSession(&SessionConfig{Tools: []Tool{tool}}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzSchema builds types out of the input, and checks that what encoding/json writes for a value of a type is what its schema describes.
func FuzzSchema(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17})
	f.Add([]byte{17, 17, 17, 17, 17, 1, 2, 3, 0, 9, 14, 3, 15, 4, 16, 5})
	f.Add([]byte("struct of structs of lists"))
	f.Fuzz(func(t *testing.T, b []byte) {
		typ := hdlType(&b, 4)
		raw, top, err := schemaOf(typ)
		if err != nil {
			if !errors.Is(err, ErrInvalidConfig) {
				t.Fatalf("%v: %v", typ, err)
			}
			return
		}
		value, err := json.Marshal(reflect.New(typ).Elem().Interface())
		if err != nil {
			t.Fatalf("%v has a schema, %s, and no JSON: %v", typ, raw, err)
		}
		var s schemaCheck
		if err := json.Unmarshal(raw, &s); err != nil {
			t.Fatalf("%v: schema %s: %v", typ, raw, err)
		}
		if s.Type != top {
			t.Fatalf("%v: schema %s is of type %q", typ, raw, top)
		}
		s.check(t, typ, value)
	})
}

// hdlType takes a type from b.
func hdlType(b *[]byte, depth int) reflect.Type {
	take := func() int {
		if len(*b) == 0 {
			return 0
		}
		n := int((*b)[0])
		*b = (*b)[1:]
		return n
	}
	basic := []reflect.Type{reflect.TypeFor[string](), reflect.TypeFor[int](), reflect.TypeFor[bool](), reflect.TypeFor[float64](), reflect.TypeFor[uint8](),
		reflect.TypeFor[any](), reflect.TypeFor[json.RawMessage](), reflect.TypeFor[time.Time](), reflect.TypeFor[hdlNode](), reflect.TypeFor[hdlText](),
		reflect.TypeFor[chan int](), reflect.TypeFor[func()](), reflect.TypeFor[complex64](), reflect.TypeFor[hdlTree]()}
	switch n := take() % (len(basic) + 5); {
	case n < len(basic):
		return basic[n]
	case depth == 0:
		return basic[0]
	case n == len(basic):
		return reflect.SliceOf(hdlType(b, depth-1))
	case n == len(basic)+1:
		return reflect.ArrayOf(take()%4, hdlType(b, depth-1))
	case n == len(basic)+2:
		return reflect.MapOf(basic[take()%2], hdlType(b, depth-1))
	case n == len(basic)+3:
		return reflect.PointerTo(hdlType(b, depth-1))
	}
	var fields []reflect.StructField
	for i := range take() % 5 {
		tag := []string{``, `json:"x"`, `json:",omitempty"`, `json:"-"`, `json:"y,string"`, `description:"d"`}[take()%6]
		fields = append(fields, reflect.StructField{Name: fmt.Sprint("F", i), Type: hdlType(b, depth-1), Tag: reflect.StructTag(tag)})
	}
	return reflect.StructOf(fields)
}

type schemaCheck struct {
	Ref                  string                 `json:"$ref"`
	Type                 string                 `json:"type"`
	Properties           map[string]schemaCheck `json:"properties"`
	Required             []string               `json:"required"`
	AdditionalProperties *schemaCheck           `json:"additionalProperties"`
	Items                *schemaCheck           `json:"items"`
}

func (s schemaCheck) check(t *testing.T, typ reflect.Type, value json.RawMessage) {
	kinds := map[byte][]string{'"': {"string"}, '{': {"object"}, '[': {"array"}, 't': {"boolean"}, 'f': {"boolean"}}
	if string(value) == "null" || s.Ref != "" || s.Type == "" {
		return // nil pointers, lists and maps; what refers elsewhere; anything
	}
	want, ok := kinds[value[0]]
	if !ok {
		want = []string{"integer", "number"}
	}
	if !slices.Contains(want, s.Type) {
		t.Fatalf("%v: %s where the schema says %s", typ, value, s.Type)
	}
	switch value[0] {
	case '[':
		var list []json.RawMessage
		_ = json.Unmarshal(value, &list)
		for _, v := range list {
			s.Items.check(t, typ, v)
		}
	case '{':
		var object map[string]json.RawMessage
		_ = json.Unmarshal(value, &object)
		for name, v := range object {
			p, ok := s.Properties[name]
			if !ok {
				t.Fatalf("%v: the schema lacks %q", typ, name)
			}
			p.check(t, typ, v)
		}
		for _, name := range s.Required {
			if _, ok := object[name]; !ok {
				t.Fatalf("%v: %q is required and not written", typ, name)
			}
		}
	}
}

// hdlReal is a session of the real CLI with a model that does what prompts say.
type hdlReal struct {
	client *Client
	model  *modelServer
}

func (r hdlReal) config(t *testing.T, cfg SessionConfig) *SessionConfig {
	cfg.Model, cfg.WorkingDirectory = "fake-model", t.TempDir()
	cfg.Provider = &ProviderConfig{Type: "openai", WireAPI: "completions", BaseURL: r.model.URL + "/v1", APIKey: "dummy"}
	return &cfg
}

// hdlContext is testContext with the patience that a busy machine needs for whole turns.
func hdlContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// ask runs a turn and returns the final message and the outcomes of its tool calls.
func (r hdlReal) ask(t *testing.T, cfg SessionConfig, prompt string) (text string, tools []*ToolExecutionComplete, err error) {
	t.Helper()
	ctx := hdlContext(t)
	s, err := r.client.CreateSession(ctx, r.config(t, cfg))
	if err != nil {
		t.Fatal(err)
	}
	for e, errTurn := range s.Ask(ctx, Message{Prompt: prompt}) {
		if err = errTurn; err != nil {
			break
		}
		switch p := e.Payload().(type) {
		case *AssistantMessage:
			text = p.Content
		case *ToolExecutionComplete:
			tools = append(tools, p)
		}
	}
	if err := s.Disconnect(ctx); err != nil {
		t.Error(err)
	}
	return text, tools, err
}

// TestRealHandlers lets the real CLI ask.
func TestRealHandlers(t *testing.T) {
	r := hdlReal{startReal(t, Options{}), newModelServer(t)}
	tool := func(f func() (string, error)) SessionConfig {
		type in struct {
			City string `json:"city" description:"where" enum:"Oslo,Rome"`
		}
		w := NewTool("weather", "Tells the weather", func(_ context.Context, in in) (string, error) {
			if in.City != "Oslo" {
				return "", fmt.Errorf("city is %q", in.City)
			}
			return f()
		})
		w.SkipPermission = true
		return SessionConfig{Tools: []Tool{w}}
	}
	const call = `call: weather {"city":"Oslo"}`
	for _, tc := range []struct {
		name, prompt string
		cfg          SessionConfig
		want         string // in the final message; "" when there is none
		code         string // of the tool's error
	}{
		{"tool", call, tool(func() (string, error) { return "sunny", nil }), "tool said: sunny", ""},
		{"tool fails", call, tool(func() (string, error) { return "", errors.New("no weather") }), "tool said: no weather", "failure"},
		{"tool panics", call, tool(func() (string, error) { panic("bang") }), "tool said: the host's handler panicked", "failure"},
		{"bad arguments", `call: weather {"city":7}`, tool(func() (string, error) { return "sunny", nil }), "tool said: arguments of weather", "failure"},
		{"two tools", call[:4] + "s" + call[4:] + " ; " + call[6:], tool(func() (string, error) { return "sunny", nil }), "tool said: sunny | sunny", ""},
		{"structured result", call, SessionConfig{Tools: []Tool{{Name: "weather", SkipPermission: true, Handler: func(context.Context, ToolCall) (ToolResult, error) {
			return ToolResult{Text: "no entry", Type: ToolDenied}, nil
		}}}}, "tool said: no entry", "denied"},
		{"binary result", call, SessionConfig{Tools: []Tool{{Name: "weather", SkipPermission: true, Handler: func(context.Context, ToolCall) (ToolResult, error) {
			return ToolResult{Text: "map", SessionLog: "log", Telemetry: map[string]any{"metrics": map[string]any{"n": 1}}, Binary: []ToolBinary{NewToolBinary("text/plain", []byte("x"))}}, nil
		}}}}, "tool said: map", ""},

		{"approve", `call: bash {"command":"echo made","description":"make"}`, SessionConfig{OnPermission: ApproveAll}, "made", ""},
		{"approve for the session", `call: bash {"command":"touch a && echo made","description":"make"}`,
			SessionConfig{OnPermission: func(_ context.Context, r PermissionRequest) (PermissionDecision, error) {
				return ApproveForSession(r.Approval()), nil
			}}, "made", ""},
		{"reject", `call: bash {"command":"touch a","description":"make"}`, hdlDecide(func() (PermissionDecision, error) { return Reject("not today"), nil }), "not today", "denied"},
		{"deny all", `call: bash {"command":"touch a","description":"make"}`, SessionConfig{OnPermission: DenyAll}, "denied by the host's policy", "denied"},
		{"nobody decides", `call: bash {"command":"touch a","description":"make"}`, hdlDecide(func() (PermissionDecision, error) { panic("bang") }), "tool said:", "denied"},
		{"zero decision", `call: bash {"command":"touch a","description":"make"}`, hdlDecide(func() (d PermissionDecision, err error) { return }), "tool said:", "denied"},

		{"question", `call: ask_user {"question":"Which?","choices":["red","blue"]}`,
			SessionConfig{OnUserInput: func(_ context.Context, r UserInputRequest) (UserInputResponse, error) {
				return UserInputResponse{Answer: r.Choices[1]}, nil
			}}, "blue", ""},
		{"question without answer", `call: ask_user {"question":"Which?","choices":["red","blue"]}`,
			SessionConfig{OnUserInput: func(context.Context, UserInputRequest) (UserInputResponse, error) { panic("bang") }}, "unable to respond", ""},

		{"hook denies", call, func() SessionConfig {
			cfg := tool(func() (string, error) { t.Error("a denied tool ran"); return "", nil })
			cfg.Hooks = &Hooks{PreToolUse: func(context.Context, PreToolUseInput) (PreToolUseOutput, error) {
				return PreToolUseOutput{Decision: HookDeny, DecisionReason: "policy"}, nil
			}}
			return cfg
		}(), "policy", "denied"},
		{"hook fails", call, func() SessionConfig {
			cfg := tool(func() (string, error) { t.Error("a denied tool ran"); return "", nil })
			cfg.Hooks = &Hooks{PreToolUse: func(context.Context, PreToolUseInput) (PreToolUseOutput, error) { panic("bang") }}
			return cfg
		}(), "panicked", "denied"},
		{"hooks change", `call: weather {"city":"Rome"}`, func() SessionConfig {
			cfg := tool(func() (string, error) { return "sunny", nil })
			cfg.Hooks = &Hooks{
				PreToolUse: func(context.Context, PreToolUseInput) (PreToolUseOutput, error) {
					return PreToolUseOutput{Decision: HookAllow, ModifiedArgs: map[string]string{"city": "Oslo"}}, nil
				},
				PostToolUse: func(_ context.Context, in PostToolUseInput) (PostToolUseOutput, error) {
					var old ToolResult
					err := json.Unmarshal(in.ToolResult, &old)
					return PostToolUseOutput{ModifiedResult: ToolResult{Text: "very " + old.Text, Type: ToolSuccess}}, err
				},
			}
			return cfg
		}(), "tool said: very sunny", ""},
		{"prompt hook", "say: original", SessionConfig{Hooks: &Hooks{UserPromptSubmitted: func(context.Context, UserPromptSubmittedInput) (UserPromptSubmittedOutput, error) {
			return UserPromptSubmittedOutput{ModifiedPrompt: "say: rewritten"}, nil
		}}}, "rewritten", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			text, tools, err := r.ask(t, tc.cfg, tc.prompt)
			if err != nil || !strings.Contains(text, tc.want) {
				t.Errorf("the turn ended with %q, %v, want %q", text, err, tc.want)
			}
			for _, result := range tools {
				switch {
				case tc.code == "" && !result.Success:
					t.Errorf("tool: %+v", *result.Error)
				case tc.code != "" && (result.Error == nil || result.Error.Code != tc.code):
					t.Errorf("tool: %+v, want code %s", result, tc.code)
				}
			}
		})
	}

	t.Run("transform", func(t *testing.T) {
		before := len(r.model.Requests())
		seen := make(chan string, 8)
		cfg := SessionConfig{Transforms: map[string]func(context.Context, string) (string, error){
			"identity": func(_ context.Context, content string) (string, error) {
				seen <- content
				return "MARK " + content, nil
			},
			"tone": func(context.Context, string) (string, error) { panic("bang") },
		}}
		if text, _, err := r.ask(t, cfg, "say: hi"); err != nil || text != "hi" {
			t.Errorf("got %q, %v", text, err)
		}
		if len(await(t, "section", seen)) == 0 {
			t.Error("the section was empty")
		}
		if body := r.model.Requests()[before].Body; !bytes.Contains(body, []byte("MARK ")) {
			t.Errorf("the model's prompt has no mark: %.500s", body)
		}
	})

	t.Run("command", func(t *testing.T) {
		ctx := hdlContext(t)
		s, err := r.client.CreateSession(ctx, r.config(t, SessionConfig{Commands: []Command{{Name: "deploy", Handler: func(_ context.Context, c CommandCall) error {
			return fmt.Errorf("no deploy to %s", c.Args)
		}}}}))
		if err != nil {
			t.Fatal(err)
		}
		var result struct{ Error string }
		if err := s.Call(ctx, "session.commands.execute", map[string]any{"commandName": "deploy", "args": "prod"}, &result); err != nil || result.Error != "no deploy to prod" {
			t.Errorf("got %+v, %v", result, err)
		}
	})

	t.Run("elicitation", func(t *testing.T) {
		ctx := hdlContext(t)
		s, err := r.client.CreateSession(ctx, r.config(t, SessionConfig{OnElicitation: func(_ context.Context, r ElicitationRequest) (ElicitationResult, error) {
			return ElicitationResult{ElicitationAccept, map[string]any{"name": r.Message}}, nil
		}}))
		if err != nil {
			t.Fatal(err)
		}
		schema := json.RawMessage(`{"type":"object","properties":{"name":{"type":"string"}}}`)
		got, err := s.UI().Elicit(ctx, "who", schema)
		if err != nil || got.Action != ElicitationAccept || got.Content["name"] != "who" {
			t.Errorf("got %+v, %v", got, err)
		}
	})

	t.Run("abort", func(t *testing.T) {
		ctx := hdlContext(t)
		b := newHdlBlock()
		s, err := r.client.CreateSession(ctx, r.config(t, SessionConfig{Tools: []Tool{{Name: "t", SkipPermission: true, Handler: b.tool}}}))
		if err != nil {
			t.Fatal(err)
		}
		turn := async(func() error { _, err := s.SendAndWait(ctx, Message{Prompt: "call: t {}"}); return err })
		select {
		case <-b.begun:
		case <-ctx.Done():
			t.Fatal("the tool was not called")
		}
		if err := s.Abort(ctx); err != nil {
			t.Fatal(err)
		}
		if cause := await(t, "tool's context", b.causes); !errors.Is(cause, ErrAborted) {
			t.Errorf("cause is %v", cause)
		}
		if err := await(t, "turn", turn); !errors.Is(err, ErrAborted) {
			t.Errorf("turn: %v", err)
		}
		if m, err := s.SendAndWait(ctx, Message{Prompt: "say: alive"}); err != nil || m.Content != "alive" {
			t.Errorf("after the abort: %+v, %v", m, err)
		}
	})
}

// TestRealPendingTool kills the CLI while a tool is pending, and answers the call to its successor.
func TestRealPendingTool(t *testing.T) {
	model, home, ctx := newModelServer(t), t.TempDir(), hdlContext(t)
	r := hdlReal{startReal(t, Options{BaseDir: home}), model}
	calls := make(chan ToolCall, 1)
	cfg := r.config(t, SessionConfig{Tools: []Tool{{Name: "t", SkipPermission: true, Handler: func(ctx context.Context, c ToolCall) (ToolResult, error) {
		calls <- c
		<-ctx.Done()
		return ToolResult{}, ctx.Err()
	}}}})
	s, err := r.client.CreateSession(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Send(ctx, Message{Prompt: "call: t {}"}); err != nil {
		t.Fatal(err)
	}
	var call ToolCall
	select {
	case call = <-calls:
	case <-ctx.Done():
		t.Fatal("the tool was not called")
	}
	// The server stores events a little later than it sends them.
	for stored := false; !stored; {
		journal, _ := os.ReadFile(filepath.Join(home, "session-state", s.ID(), "events.jsonl"))
		if stored = bytes.Contains(journal, []byte(call.RequestID)); !stored && ctx.Err() != nil {
			t.Fatal("the call was not stored")
		}
		time.Sleep(5 * time.Millisecond) // polling: nothing signals the write
	}
	if _, err := r.client.ForceStopAndWait(ctx); err != nil {
		t.Fatal(err)
	}
	r.client = startReal(t, Options{BaseDir: home})
	cfg.ContinuePendingWork = true
	p, err := r.client.PrepareResumeSession(s.ID(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	events := p.Events(ctx)
	if s, err = p.Start(ctx); err != nil {
		t.Fatal(err)
	}
	var answer struct{ Success bool }
	if err := s.Call(ctx, hdlTool, map[string]any{"requestId": call.RequestID, "result": ToolResult{Text: "late"}}, &answer); err != nil || !answer.Success {
		t.Fatalf("%+v, %v", answer, err)
	}
	text := ""
	for e, err := range events {
		if err != nil {
			t.Fatal(err)
		}
		if m, ok := e.Payload().(*AssistantMessage); ok {
			text = m.Content
		}
		if e.Type == EventSessionIdle {
			break
		}
	}
	if text != "tool said: late" || len(calls) != 0 {
		t.Errorf("the turn ended with %q, the tool was called %d times more", text, len(calls))
	}
}
