package copilot

import (
	"bytes"
	"context"
	"encoding"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// ======== route.go: what the host is asked, and how each is answered ========

// handlers are the host's functions for one session.
type handlers struct {
	tools          map[string]ToolHandler
	permission     PermissionHandler
	managed        bool
	userInput      func(ctx context.Context, r UserInputRequest) (UserInputResponse, error)
	elicitation    func(ctx context.Context, r ElicitationRequest) (ElicitationResult, error)
	exitPlanMode   func(ctx context.Context, r ExitPlanModeRequest) (ExitPlanModeResult, error)
	autoModeSwitch func(ctx context.Context, r AutoModeSwitchRequest) (AutoModeSwitchResponse, error)
	mcpAuth        func(ctx context.Context, r MCPAuthRequest) (*MCPAuthToken, error)
	sampling       func(ctx context.Context, r SamplingRequest) (any, error)
	hooks          Hooks
	hook           func(ctx context.Context, h HookCall) (any, error)
	transforms     map[string]func(ctx context.Context, content string) (string, error)
	commands       map[string]func(ctx context.Context, c CommandCall) error
	custom         map[string]HandlerFunc
}

func (c *SessionConfig) handlers() handlers {
	h := handlers{
		tools:          make(map[string]ToolHandler),
		permission:     c.OnPermission,
		managed:        c.ManagedSettings != nil || c.EnableManagedSettings != nil && *c.EnableManagedSettings,
		userInput:      c.OnUserInput,
		elicitation:    c.OnElicitation,
		exitPlanMode:   c.OnExitPlanMode,
		autoModeSwitch: c.OnAutoModeSwitch,
		mcpAuth:        c.OnMCPAuth,
		sampling:       c.OnSampling,
		hook:           c.OnHook,
		transforms:     maps.Clone(c.Transforms),
		commands:       make(map[string]func(context.Context, CommandCall) error),
		custom:         maps.Clone(c.Handlers),
	}
	if c.Hooks != nil {
		h.hooks = *c.Hooks
	}
	for _, t := range c.Tools {
		if t.Handler != nil {
			h.tools[t.Name] = t.Handler
		}
	}
	for _, cmd := range c.Commands {
		h.commands[cmd.Name] = cmd.Handler
	}
	return h
}

// react starts the handlers that an event asks for, and ends the contexts of those whose reason to run it takes away. It runs on
// the reader, after subscribers can see the event. What nobody here handles is left to other clients of the session.
func (s *Session) react(e *Event) {
	switch e.Type {
	case EventPermissionRequested:
		if s.host.permission != nil && string(member(e.Data, "resolvedByHook")) != "true" {
			s.ask(e, "session.permissions.handlePendingPermissionRequest", s.permissionJob(e.Data, e.AgentID))
		}
	case EventExternalToolRequested:
		if h := s.host.tools[unquote(member(e.Data, "toolName"))]; h != nil {
			s.ask(e, "session.tools.handlePendingToolCall", s.toolJob(h, e.Data, e.AgentID))
		}
	case EventElicitationRequested:
		if s.host.elicitation != nil {
			s.ask(e, "session.ui.handlePendingElicitation", s.elicitationJob(e))
		}
	case EventCommandExecute:
		if h := s.host.commands[unquote(member(e.Data, "commandName"))]; h != nil {
			s.ask(e, "session.commands.handlePendingCommand", s.commandJob(h, e.Data))
		}
	case EventMCPOAuthRequired:
		if s.host.mcpAuth != nil {
			s.ask(e, "session.mcp.oauth.handlePendingRequest", s.mcpAuthJob(e))
		}
	case EventSamplingRequested:
		if s.host.sampling != nil {
			s.ask(e, "session.ui.handlePendingSampling", s.samplingJob(e.Data))
		}
	case EventPermissionCompleted, EventExternalToolCompleted, EventElicitationCompleted, EventCommandCompleted,
		EventMCPOAuthCompleted, EventSamplingCompleted:
		s.tasks.resolve(eventKey(e.Type, unquote(member(e.Data, "requestId"))))
	case EventUserInputCompleted, EventExitPlanModeCompleted, EventAutoModeSwitchCompleted:
		s.tasks.observe(e.Type)
	case EventAbort:
		cancelTasks(s.tasks.ofTurn(e.AgentID), ErrAborted)
	}
}

// eventKey names what an event asks for and what another one later calls completed.
func eventKey(t EventType, requestID string) string {
	topic, _, _ := strings.Cut(string(t), ".")
	return topic + " " + requestID
}

// ask runs the job of an event that wants an answer, once, and answers by calling method.
func (s *Session) ask(e *Event, method string, j job) {
	id := unquote(member(e.Data, "requestId"))
	key := eventKey(e.Type, id)
	if id == "" || !s.tasks.first(key) {
		return
	}
	j.agent = e.AgentID
	s.client.newTask(s, j, key, &s.tasks).start(func(result any, err error) {
		s.respond(method, id, j, result, err, true)
	})
}

// respond answers an event that asked. It returns when the writer has the answer: what the server makes of it is not waited for, except that
// an answer which it or the encoder refuses is replaced, once, by that of a failed handler, so that nothing stays pending.
func (s *Session) respond(method, id string, j job, result any, err error, again bool) {
	c := s.client
	answer, err := j.reply(result, err)
	if err != nil {
		c.log.Warn("copilot: a handler's answer cannot be used", "method", method, "error", c.mask(clip(err.Error()), nil))
	}
	members, _ := answer.(map[string]any)
	if members == nil || s.released() {
		return
	}
	params := map[string]any{"sessionId": s.id, "requestId": id}
	maps.Copy(params, members)
	cl := &call{method: method, done: make(chan struct{}), then: func(raw json.RawMessage, err error) {
		var rpc *RPCError
		refused := errors.As(err, &rpc) && !errors.Is(err, ErrSessionNotFound) || errors.Is(err, ErrInvalidConfig)
		switch {
		case refused && again:
			c.log.Warn("copilot: an answer was refused", "method", method)
			go s.respond(method, id, j, nil, errRefused, false) // owned by the client; ends when the writer has the answer, or with the connection
		case err != nil:
			c.log.Debug("copilot: an answer did not arrive", "method", method)
		case string(member(raw, "success")) == "false":
			c.log.Debug("copilot: an answer came too late", "method", method)
		}
	}}
	_ = c.conn.request(context.Background(), cl, params) // then has seen the error
}

// released reports whether the session has ended and the server is not just about to let go of it: answers are of no use any more.
func (s *Session) released() bool {
	if s.failure() == nil {
		return false
	}
	s.client.mu.Lock()
	defer s.client.mu.Unlock()
	return s.releasing == nil || isClosed(s.releasing.done)
}

// directRequest returns what makes a job of a request of the server that names a session, nil for methods that are not known.
func (c *Client) directRequest(method string) func(s *Session, params json.RawMessage) job {
	switch method {
	case "userInput.request":
		return (*Session).userInputJob
	case "exitPlanMode.request":
		return (*Session).exitPlanModeJob
	case "autoModeSwitch.request":
		return (*Session).autoModeSwitchJob
	case "hooks.invoke":
		return (*Session).hookJob
	case "systemMessage.transform":
		return (*Session).transformJob
	}
	return c.hostRequest(method)
}

type traceKey struct{}

// TraceContextFrom returns the W3C trace context that the server sent with the tool call which ctx, a handler's, is for; empty strings
// where there is none. Calls made with such a ctx carry it, unless Options.TraceContext supplies another.
func TraceContextFrom(ctx context.Context) (traceparent, tracestate string) {
	t, _ := ctx.Value(traceKey{}).([2]string)
	return t[0], t[1]
}

// ---- tools ----

// ToolCall is a call of one of the host's tools by the model.
type ToolCall struct {
	SessionID        string
	RequestID        string          // names the request: a host that is restarted can answer it by session.tools.handlePendingToolCall, see [SessionConfig.ContinuePendingWork]
	ID               string          // the model's id of the call
	Name             string          // of the tool
	Arguments        json.RawMessage // as received, {} when the model sent none; do not change it
	WorkingDirectory string          // the session's
	AgentID          string          // the sub-agent that calls, "" for the main agent
}

// ToolHandler runs a tool. It is called on a goroutine of its own, several at a time. ctx ends when the call is answered elsewhere, the turn is aborted,
// or the session or client ends; context.Cause tells which. An error, and a panic, is a failure whose text the model gets; the
// result is ignored then.
type ToolHandler func(ctx context.Context, call ToolCall) (ToolResult, error)

// ToolResult is the outcome of a tool call. The zero value is a success with no text. It encodes as the protocol has it.
type ToolResult struct {
	// Text is for the model.
	Text string `json:"textResultForLlm"`
	// Type is the outcome; "" means success, or failure when Error is set.
	Type ToolResultType `json:"resultType,omitempty"`
	// Error is what people see of a failure; "" means Text.
	Error string `json:"error,omitempty"`
	// SessionLog is a longer text for the session's timeline.
	SessionLog string `json:"sessionLog,omitempty"`
	// Telemetry is merged into the runtime's: "properties" of strings, "metrics" of numbers.
	Telemetry map[string]any `json:"toolTelemetry,omitempty"`
	// Binary are images and resources for the model, see [NewToolBinary].
	Binary []ToolBinary `json:"binaryResultsForLlm,omitempty"`
	// Contents are typed blocks for user interfaces.
	Contents []ToolContent `json:"contents,omitempty"`
	// References are names of tools to load, for a tool that searches for tools.
	References []string `json:"toolReferences,omitempty"`
}

// ToolResultType is how a tool call ended.
type ToolResultType string

// The outcomes of a tool call. All but the fourth let the agent go on.
const (
	ToolSuccess  ToolResultType = "success"
	ToolFailure  ToolResultType = "failure"
	ToolTimeout  ToolResultType = "timeout"
	ToolRejected ToolResultType = "rejected" // ends the agent's run
	ToolDenied   ToolResultType = "denied"
)

// NewToolBinary returns data as a part of a [ToolResult]: an image where mimeType says so, else a resource.
func NewToolBinary(mimeType string, data []byte) ToolBinary {
	kind := "resource"
	if strings.HasPrefix(mimeType, "image/") {
		kind = "image"
	}
	return ToolBinary{Type: kind, MIMEType: mimeType, Data: base64.StdEncoding.EncodeToString(data)}
}

func (s *Session) toolJob(h ToolHandler, data json.RawMessage, agent string) job {
	return job{
		scope: turnScope,
		run: func(ctx context.Context) (any, error) {
			call := ToolCall{
				SessionID:        s.id,
				RequestID:        unquote(member(data, "requestId")),
				ID:               unquote(member(data, "toolCallId")),
				Name:             unquote(member(data, "toolName")),
				Arguments:        member(data, "arguments"),
				WorkingDirectory: unquote(member(data, "workingDirectory")),
				AgentID:          agent,
			}
			if call.ID == "" {
				return nil, errors.New("the request has no toolCallId")
			}
			if call.Arguments == nil || string(call.Arguments) == "null" {
				call.Arguments = json.RawMessage("{}")
			}
			if parent := unquote(member(data, "traceparent")); parent != "" {
				ctx = context.WithValue(ctx, traceKey{}, [2]string{parent, unquote(member(data, "tracestate"))})
			}
			return h(ctx, call)
		},
		reply: func(result any, err error) (any, error) {
			r, _ := result.(ToolResult)
			r, err = r.checked(err)
			if r.Type == "" && reflect.DeepEqual(r, ToolResult{Text: r.Text}) {
				return map[string]any{"result": r.Text}, err
			}
			return map[string]any{"result": r}, err
		},
	}
}

// checked returns what the server is told. It takes an unknown type for a success, which must not happen to a failure.
func (r ToolResult) checked(err error) (ToolResult, error) {
	switch r.Type {
	case "", ToolSuccess, ToolFailure, ToolTimeout, ToolRejected, ToolDenied:
	default:
		if err == nil {
			err = fmt.Errorf("%w: unknown tool result type %.64q", errBadHandler, string(r.Type))
		}
		return failure(err), err
	}
	if err != nil {
		return failure(err), nil
	}
	if r.Error != "" && r.Type == "" {
		r.Type = ToolFailure
	}
	if r.Text == "" && r.Type != "" && r.Type != ToolSuccess {
		r.Text = r.Error
	}
	return r, nil
}

func failure(err error) ToolResult {
	return ToolResult{Text: err.Error(), Type: ToolFailure, Error: err.Error()}
}

// NewTool returns a tool whose arguments decode into In, and whose schema is [SchemaFor] In: a struct or a map, or a pointer to one. What fn
// returns becomes the result: a [ToolResult] as it is; a string or []byte as text, or as a binary resource when it is not UTF-8;
// nil as a success with no text; anything else as JSON. Arguments that do not decode are a failure, of which the model is told. The
// other fields of the tool may be set afterwards. An In that has no schema, or is no object, makes
// [Client.PrepareSession] fail with ErrInvalidConfig.
func NewTool[In, Out any](name, description string, fn func(ctx context.Context, in In) (Out, error)) Tool {
	t := Tool{Name: name, Description: description}
	if schema, err := argumentsSchema(reflect.TypeFor[In]()); err != nil {
		t.Parameters = unusable{err}
	} else {
		t.Parameters = schema
	}
	if fn == nil {
		return t
	}
	t.Handler = func(ctx context.Context, call ToolCall) (ToolResult, error) {
		var in In
		dec := json.NewDecoder(bytes.NewReader(call.Arguments))
		dec.UseNumber() // for members of type any
		if err := dec.Decode(&in); err != nil {
			return ToolResult{}, fmt.Errorf("arguments of %s: %s", call.Name, clip(err.Error()))
		}
		out, err := fn(ctx, in)
		if err != nil {
			return ToolResult{}, err
		}
		return newToolResult(out)
	}
	return t
}

func newToolResult(out any) (ToolResult, error) {
	switch out := out.(type) {
	case nil:
		return ToolResult{}, nil
	case ToolResult:
		return out, nil
	case json.RawMessage:
		return ToolResult{Text: string(out)}, nil
	}
	v := reflect.ValueOf(out)
	switch v.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Interface:
		if v.IsNil() {
			return ToolResult{}, nil
		}
	}
	switch out := out.(type) {
	case *ToolResult:
		return *out, nil
	case string:
		return textOrBinary([]byte(out)), nil
	case []byte:
		return textOrBinary(out), nil
	}
	raw, err := marshal(out)
	return ToolResult{Text: string(raw)}, err
}

func textOrBinary(b []byte) ToolResult {
	if utf8.Valid(b) {
		return ToolResult{Text: string(b)}
	}
	return ToolResult{Binary: []ToolBinary{NewToolBinary("application/octet-stream", b)}}
}

// unusable stands for a schema that could not be made; preparing a session brings the reason to light.
type unusable struct{ err error }

func (u unusable) MarshalJSON() ([]byte, error) { return nil, u.err }

// ---- permissions ----

// PermissionKind tells what a permission is asked for. The set is open.
type PermissionKind string

// The kinds of permissions that are known.
const (
	PermissionShell           PermissionKind = "shell"
	PermissionWrite           PermissionKind = "write"
	PermissionRead            PermissionKind = "read"
	PermissionMCP             PermissionKind = "mcp"
	PermissionURL             PermissionKind = "url"
	PermissionMemory          PermissionKind = "memory"
	PermissionCustomTool      PermissionKind = "custom-tool"
	PermissionHook            PermissionKind = "hook" // a preToolUse hook answered "ask"
	PermissionExtension       PermissionKind = "extension-management"
	PermissionWorkflow        PermissionKind = "workflow"
	PermissionExtensionAccess PermissionKind = "extension-permission-access"
	PermissionExtensionEnv    PermissionKind = "extension-env-access"
)

// PermissionRequest asks whether the agent may do something. Kind says which fields count; each names the kinds that have it. A request whose
// members do not fit has Kind "" and Raw only. One tool call may ask more than once.
type PermissionRequest struct {
	SessionID  string         `json:"-"`
	RequestID  string         `json:"-"`
	AgentID    string         `json:"-"` // the sub-agent that asks, "" for the main agent
	Kind       PermissionKind `json:"kind"`
	ToolCallID string         `json:"toolCallId"`
	Intention  string         `json:"intention"` // shell, write, read, url: why, in the agent's words

	// Managed says that the session is under managed settings: nobody may approve everything.
	Managed bool `json:"-"`
	// ManagedApprovalRequired says that a human must decide; an approval by rule is not allowed.
	ManagedApprovalRequired bool `json:"-"`

	FullCommandText          string              `json:"fullCommandText"`          // shell
	Commands                 []PermissionCommand `json:"commands"`                 // shell
	PossiblePaths            []string            `json:"possiblePaths"`            // shell
	PossibleURLs             []PermissionURLPart `json:"possibleUrls"`             // shell
	HasWriteFileRedirection  bool                `json:"hasWriteFileRedirection"`  // shell
	ResolvedWorkingDirectory string              `json:"resolvedWorkingDirectory"` // shell
	ResolvedPaths            map[string]string   `json:"resolvedPaths"`            // shell
	Warning                  string              `json:"warning"`                  // shell
	CanOfferSessionApproval  bool                `json:"canOfferSessionApproval"`  // shell, write

	FileName        string  `json:"fileName"`        // write
	Diff            string  `json:"diff"`            // write
	NewFileContents *string `json:"newFileContents"` // write
	Path            string  `json:"path"`            // read
	ResolvedPath    string  `json:"resolvedPath"`    // write, read

	ServerName      string          `json:"serverName"`      // mcp
	ToolName        string          `json:"toolName"`        // mcp, custom-tool, hook
	ToolTitle       string          `json:"toolTitle"`       // mcp
	ToolDescription string          `json:"toolDescription"` // custom-tool
	ReadOnly        bool            `json:"readOnly"`        // mcp
	Args            json.RawMessage `json:"args"`            // mcp, custom-tool
	ToolArgs        json.RawMessage `json:"toolArgs"`        // hook
	HookMessage     string          `json:"hookMessage"`     // hook

	URL            string `json:"url"`            // url
	RedirectedFrom string `json:"redirectedFrom"` // url

	Fact      string `json:"fact"`      // memory
	Subject   string `json:"subject"`   // memory
	Action    string `json:"action"`    // memory: store, vote
	Citations string `json:"citations"` // memory

	Name                 string   `json:"name"`                 // workflow
	Description          string   `json:"description"`          // workflow
	ApprovalKey          string   `json:"approvalKey"`          // workflow
	Operation            string   `json:"operation"`            // extension-management, workflow
	ExtensionName        string   `json:"extensionName"`        // extension-*
	Capabilities         []string `json:"capabilities"`         // extension-permission-access
	EnvironmentVariables []string `json:"environmentVariables"` // extension-env-access

	// SandboxBypass says that it would run outside the sandbox, and SandboxBypassReason why.
	SandboxBypass       bool   `json:"requestSandboxBypass"`
	SandboxBypassReason string `json:"requestSandboxBypassReason"`

	// Prompt is the request made ready for a user interface, nil when there is none.
	Prompt json.RawMessage `json:"-"`
	// Raw is the request as received.
	Raw json.RawMessage `json:"-"`
}

// PermissionCommand is one command of a shell line.
type PermissionCommand struct {
	Identifier string `json:"identifier"`
	ReadOnly   bool   `json:"readOnly"`
}

// PermissionURLPart is a URL that a shell line may visit.
type PermissionURLPart struct {
	URL string `json:"url"`
}

// Paths returns the files and directories that the request says it is about; empty does not mean that it touches none.
func (r PermissionRequest) Paths() []string {
	paths := slices.Clone(r.PossiblePaths)
	for _, p := range []string{r.FileName, r.Path} {
		if p != "" {
			paths = append(paths, p)
		}
	}
	return paths
}

// Approval returns what would let the like of this request pass from now on, for [ApproveForSession] and [ApproveForLocation]. It is the zero
// value for kinds that have no such thing.
func (r PermissionRequest) Approval() PermissionApproval {
	switch r.Kind {
	case PermissionShell:
		a := PermissionApproval{Kind: "commands"}
		for _, c := range r.Commands {
			a.CommandIdentifiers = append(a.CommandIdentifiers, c.Identifier)
		}
		return a
	case PermissionRead, PermissionWrite, PermissionMemory:
		return PermissionApproval{Kind: string(r.Kind)}
	case PermissionMCP:
		return PermissionApproval{Kind: "mcp", ServerName: r.ServerName, ToolName: r.ToolName}
	case PermissionCustomTool:
		return PermissionApproval{Kind: "custom-tool", ToolName: r.ToolName}
	case PermissionExtension:
		return PermissionApproval{Kind: string(r.Kind), Operation: r.Operation}
	case PermissionWorkflow:
		return PermissionApproval{Kind: "workflow", ApprovalKey: r.ApprovalKey}
	case PermissionExtensionAccess:
		return PermissionApproval{Kind: string(r.Kind), ExtensionName: r.ExtensionName}
	case PermissionExtensionEnv:
		return PermissionApproval{Kind: string(r.Kind), ExtensionName: r.ExtensionName, EnvironmentVariables: r.EnvironmentVariables}
	}
	return PermissionApproval{}
}

// PermissionApproval is what an approval covers beyond the request at hand. Kind says which of the other fields count.
type PermissionApproval struct {
	Kind                 string   // commands, read, write, memory, mcp, mcp-sampling, custom-tool, extension-management, workflow, extension-permission-access, extension-env-access
	CommandIdentifiers   []string // commands
	ServerName           string   // mcp, mcp-sampling
	ToolName             string   // mcp, where "" is every tool of the server; custom-tool
	Operation            string   // extension-management; "" is every one
	ApprovalKey          string   // workflow; "" is every one
	ExtensionName        string   // extension-*-access
	EnvironmentVariables []string // extension-env-access
}

// members returns the wire form, false when a needed field is missing or the kind unknown.
func (a PermissionApproval) members() (map[string]any, bool) {
	m := map[string]any{"kind": a.Kind}
	need := func(name, value string) bool {
		m[name] = value
		return value != ""
	}
	option := func(name, value string) bool {
		if value != "" {
			m[name] = value
		}
		return true
	}
	switch a.Kind {
	case "read", "write", "memory":
		return m, true
	case "commands":
		m["commandIdentifiers"] = a.CommandIdentifiers
		return m, len(a.CommandIdentifiers) > 0
	case "mcp":
		m["toolName"] = nil
		return m, need("serverName", a.ServerName) && option("toolName", a.ToolName)
	case "mcp-sampling":
		return m, need("serverName", a.ServerName)
	case "custom-tool":
		return m, need("toolName", a.ToolName)
	case "extension-management":
		return m, option("operation", a.Operation)
	case "workflow":
		return m, option("approvalKey", a.ApprovalKey)
	case "extension-permission-access":
		return m, need("extensionName", a.ExtensionName)
	case "extension-env-access":
		m["environmentVariables"] = a.EnvironmentVariables
		return m, need("extensionName", a.ExtensionName) && len(a.EnvironmentVariables) > 0
	}
	return nil, false
}

// PermissionDecision is the answer to a [PermissionRequest], made by one of the constructors. The zero value is no approval: it says
// that nobody can decide. So does a decision that is not complete.
type PermissionDecision struct {
	kind        string // "" is the zero value, "no-result" sends nothing
	feedback    string
	approval    *PermissionApproval
	location    string
	domain      string
	interactive bool
	context     *DecisionContext
}

// DecisionContext says how a decision came about, for the session's records. Empty members are not sent.
type DecisionContext struct {
	Outcome            string `json:"outcome,omitempty"`            // auto_approved, autopilot_denied, prompted_user
	Source             string `json:"source,omitempty"`             // assisted_approval, human_response, host_policy, unattended_fallback, authorization_carry_forward
	Surface            string `json:"surface,omitempty"`            // tui, prompt_mode, copilot_app, acp, sdk
	ResponseCapability string `json:"responseCapability,omitempty"` // interactive, headless, none
}

// ApproveOnce allows this one request.
func ApproveOnce() PermissionDecision { return PermissionDecision{kind: "approve-once"} }

// ApproveForSession allows the request and, for the rest of the session, what approval covers, see [PermissionRequest.Approval]. A zero approval covers
// this request only.
func ApproveForSession(approval PermissionApproval) PermissionDecision {
	d := PermissionDecision{kind: "approve-for-session"}
	if !reflect.ValueOf(approval).IsZero() {
		d.approval = &approval
	}
	return d
}

// ApproveDomainForSession allows a request of kind url and, for the rest of the session, its domain.
func ApproveDomainForSession(domain string) PermissionDecision {
	return PermissionDecision{kind: "approve-for-session", domain: domain}
}

// ApproveForLocation allows the request and, from now on, what approval covers in this repository or folder. The RPC
// session.permissions.locations.resolve gives the locationKey.
func ApproveForLocation(approval PermissionApproval, locationKey string) PermissionDecision {
	return PermissionDecision{kind: "approve-for-location", approval: &approval, location: locationKey}
}

// ApprovePermanently allows a request of kind url and its domain for good. Other kinds do not know it; there it counts as nobody's decision.
func ApprovePermanently(domain string) PermissionDecision {
	return PermissionDecision{kind: "approve-permanently", domain: domain}
}

// Reject refuses the request. The model gets the feedback and goes on; without feedback the server aborts the whole turn.
func Reject(feedback string) PermissionDecision {
	return PermissionDecision{kind: "reject", feedback: feedback}
}

// UserNotAvailable says that nobody can decide: the request fails and the agent goes on.
func UserNotAvailable() PermissionDecision { return PermissionDecision{kind: "user-not-available"} }

// NoResult sends no answer: another client gives one, or this host later by [Session.Call] of session.permissions.handlePendingPermissionRequest.
func NoResult() PermissionDecision { return PermissionDecision{kind: "no-result"} }

// Interactive returns d, an [ApproveOnce], marked as given by a human.
func (d PermissionDecision) Interactive() PermissionDecision {
	d.interactive = true
	return d
}

// WithContext returns d with a note on how it came about.
func (d PermissionDecision) WithContext(c DecisionContext) PermissionDecision {
	d.context = &c
	return d
}

// MarshalJSON returns the decision as the protocol has it, for a later answer by [Session.Call]. It fails for NoResult and decisions that are not complete.
func (d PermissionDecision) MarshalJSON() ([]byte, error) {
	m, err := d.members(PermissionURL)
	if err == nil && d.kind == "no-result" {
		err = fmt.Errorf("%w: no result to send", errBadHandler)
	}
	if err != nil {
		return nil, err
	}
	return marshal(m)
}

// members returns the wire form of a decision on a request of this kind.
func (d PermissionDecision) members(kind PermissionKind) (map[string]any, error) {
	m := map[string]any{"kind": d.kind}
	if d.approval != nil {
		approval, ok := d.approval.members()
		if !ok {
			return nil, fmt.Errorf("%w: approval of kind %.64q is unknown or incomplete", errBadHandler, d.approval.Kind)
		}
		m["approval"] = approval
	}
	switch d.kind {
	case "no-result", "user-not-available":
	case "approve-once":
		if d.interactive {
			m["approvedInteractively"] = true
		}
	case "approve-for-session":
		if d.domain != "" {
			m["domain"] = d.domain
		}
	case "approve-for-location":
		if d.location == "" {
			return nil, fmt.Errorf("%w: approval for a location without its key", errBadHandler)
		}
		m["locationKey"] = d.location
	case "approve-permanently":
		if d.domain == "" || kind != PermissionURL {
			return nil, fmt.Errorf("%w: a permanent approval is for a domain, of a request of kind url", errBadHandler)
		}
		m["domain"] = d.domain
	case "reject":
		if d.feedback != "" {
			m["feedback"] = d.feedback
		}
	default:
		return nil, fmt.Errorf("%w: zero permission decision", errBadHandler)
	}
	return m, nil
}

// PermissionHandler decides on permissions. It is called on a goroutine of its own, several at a time, and may take as long as a human does. ctx ends
// when the request is resolved elsewhere, the turn is aborted, or the session or client ends; context.Cause tells which. On an error or a panic the
// server is told that nobody can decide.
type PermissionHandler func(ctx context.Context, r PermissionRequest) (PermissionDecision, error)

// denied is the feedback of automatic rejections. A rejection without words would end the agent's run.
const denied = "denied by the host's policy"

// ApproveAll is a [PermissionHandler] that allows everything. Under managed settings nothing is allowed by it, and what a human must decide stays pending.
func ApproveAll(_ context.Context, r PermissionRequest) (PermissionDecision, error) {
	if r.Managed {
		return UserNotAvailable(), errors.New("managed settings do not let the host approve everything")
	}
	if r.ManagedApprovalRequired {
		return NoResult(), nil
	}
	return ApproveOnce(), nil
}

// DenyAll is a [PermissionHandler] that rejects everything, with a feedback that lets the agent go on.
func DenyAll(context.Context, PermissionRequest) (PermissionDecision, error) {
	return Reject(denied), nil
}

// ApproveIf returns a [PermissionHandler] that allows what pred reports true for, and rejects the rest as [DenyAll] does. What managed settings
// want a human to decide stays pending where pred would allow it.
func ApproveIf(pred func(PermissionRequest) bool) PermissionHandler {
	return func(_ context.Context, r PermissionRequest) (PermissionDecision, error) {
		switch {
		case !pred(r):
			return Reject(denied), nil
		case r.ManagedApprovalRequired:
			return NoResult(), nil
		}
		return ApproveOnce(), nil
	}
}

func (s *Session) permissionJob(data json.RawMessage, agent string) job {
	raw := member(data, "permissionRequest")
	if raw == nil {
		raw = data
	}
	kind := PermissionKind(unquote(member(raw, "kind")))
	return job{
		scope: turnScope,
		run: func(ctx context.Context) (any, error) {
			var r PermissionRequest
			if err := json.Unmarshal(raw, &r); err != nil {
				r, kind = PermissionRequest{}, ""
			}
			r.SessionID, r.RequestID, r.AgentID = s.id, unquote(member(data, "requestId")), agent
			r.Kind, r.Raw, r.Prompt, r.Managed = kind, raw, member(data, "promptRequest"), s.host.managed
			for _, request := range []json.RawMessage{raw, r.Prompt} {
				switch string(member(request, "managedApprovalRequired")) {
				case "", "null", "false":
				default: // anything else is not to be taken for a no
					r.ManagedApprovalRequired = true
				}
			}
			return s.host.permission(ctx, r)
		},
		reply: func(result any, err error) (any, error) {
			d, _ := result.(PermissionDecision)
			if err != nil {
				d = UserNotAvailable()
			}
			result, err = d.members(kind)
			if err != nil {
				d = UserNotAvailable()
				result, _ = d.members(kind)
			}
			if d.kind == "no-result" {
				return nil, nil
			}
			members := map[string]any{"result": result}
			if d.context != nil {
				members["decisionContext"] = d.context
			}
			return members, err
		},
	}
}

// ---- questions ----

// UserInputRequest is a question of the agent to the user.
type UserInputRequest struct {
	SessionID     string
	Question      string
	Choices       []string // nil when there are none
	AllowFreeform bool     // whether an answer other than one of the choices will do
}

// UserInputResponse is the answer to a question.
type UserInputResponse struct {
	Answer string
	// WasFreeform says that the answer was typed, not chosen. An answer that is none of the choices is sent as such in any case.
	WasFreeform bool
}

var errNoQuestion = errors.New("question is missing")

func (s *Session) userInputJob(params json.RawMessage) job {
	j := job{scope: turnScope, observer: EventUserInputCompleted, reply: func(result any, err error) (any, error) {
		var bad *paramsError
		switch {
		case errors.As(err, &bad):
			return nil, err
		case err != nil: // the model is told that the user was unable to answer
			return map[string]any{"noResponse": true}, nil
		}
		return result, nil
	}}
	if h := s.host.userInput; h != nil {
		j.run = func(ctx context.Context) (any, error) {
			var wire struct {
				Question      *string  `json:"question"`
				Choices       []string `json:"choices"`
				AllowFreeform *bool    `json:"allowFreeform"`
			}
			if err := decodeParams(params, &wire); err != nil {
				return nil, err
			}
			if wire.Question == nil {
				return nil, &paramsError{errNoQuestion}
			}
			r := UserInputRequest{s.id, *wire.Question, wire.Choices, wire.AllowFreeform == nil || *wire.AllowFreeform}
			a, err := h(ctx, r)
			return map[string]any{"answer": a.Answer, "wasFreeform": a.WasFreeform || !slices.Contains(r.Choices, a.Answer)}, err
		}
	}
	return j
}

// ElicitationRequest asks the user to fill in a form or to visit a page.
type ElicitationRequest struct {
	SessionID     string          `json:"-"`
	RequestID     string          `json:"requestId"`
	ToolCallID    string          `json:"toolCallId"`
	Source        string          `json:"elicitationSource"` // an MCP server; "" for the agent or a client
	Message       string          `json:"message"`
	Mode          string          `json:"mode"`            // "form" or "url"; the set is open
	Schema        json.RawMessage `json:"requestedSchema"` // form: a JSON Schema
	URL           string          `json:"url"`             // url
	ElicitationID string          `json:"elicitationId"`   // url
}

// ElicitationAction is what the user did with an elicitation.
type ElicitationAction string

// What users do with elicitations.
const (
	ElicitationAccept  ElicitationAction = "accept"
	ElicitationDecline ElicitationAction = "decline"
	ElicitationCancel  ElicitationAction = "cancel"
)

// ElicitationResult is the outcome of an elicitation. The zero value cancels.
type ElicitationResult struct {
	Action ElicitationAction `json:"action"`
	// Content holds the form's values, with ElicitationAccept: strings, numbers, booleans, lists of strings. Numbers of the server's come as
	// [json.Number].
	Content map[string]any `json:"content,omitempty"`
}

// UnmarshalJSON keeps the digits of numbers.
func (r *ElicitationResult) UnmarshalJSON(b []byte) error {
	type plain ElicitationResult
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	return dec.Decode((*plain)(r))
}

func (s *Session) elicitationJob(e *Event) job {
	j := job{
		run: func(ctx context.Context) (any, error) {
			r := ElicitationRequest{SessionID: s.id}
			if err := e.Decode(&r); err != nil {
				return nil, &paramsError{err}
			}
			if r.Mode == "" {
				r.Mode = "form"
			}
			return s.host.elicitation(ctx, r)
		},
		reply: func(result any, err error) (any, error) {
			var bad *paramsError
			if errors.As(err, &bad) {
				return nil, nil // not understood: somebody else may
			}
			r, _ := result.(ElicitationResult)
			members := map[string]any{"action": r.Action}
			switch {
			case err != nil:
				members["action"] = ElicitationCancel
			case r.Action == ElicitationAccept && unquote(member(e.Data, "mode")) != "url":
				if members["content"] = r.Content; r.Content == nil {
					members["content"] = struct{}{}
				}
			case r.Action == ElicitationAccept, r.Action == ElicitationDecline, r.Action == ElicitationCancel:
			default:
				members["action"] = ElicitationCancel
				err = fmt.Errorf("%w: unknown elicitation action %.64q", errBadHandler, string(r.Action))
			}
			return map[string]any{"result": members}, err
		},
	}
	if member(e.Data, "toolCallId") != nil || member(e.Data, "elicitationSource") != nil {
		j.scope = turnScope // a tool waits for it
	}
	return j
}

// ExitPlanModeRequest asks whether a plan is approved.
type ExitPlanModeRequest struct {
	SessionID         string
	Summary           string
	PlanContent       string   // the whole plan, "" when it was not sent
	Actions           []string // what may follow: exit_only, interactive, autopilot, autopilot_fleet
	RecommendedAction string
}

// ExitPlanModeResult is the decision on a plan. The zero value does not approve it.
type ExitPlanModeResult struct {
	Approved            bool   `json:"approved"`
	SelectedAction      string `json:"selectedAction,omitempty"` // one of the request's Actions
	Feedback            string `json:"feedback,omitempty"`       // sends the agent back to planning when the plan is not approved
	AutoApproveEdits    bool   `json:"autoApproveEdits,omitempty"`
	DeferImplementation bool   `json:"deferImplementation,omitempty"`
}

func (s *Session) exitPlanModeJob(params json.RawMessage) job {
	h := s.host.exitPlanMode
	if h == nil {
		return job{reply: func(any, error) (any, error) { return ExitPlanModeResult{Approved: true}, nil }}
	}
	return job{scope: turnScope, observer: EventExitPlanModeCompleted,
		run: func(ctx context.Context) (any, error) {
			r := ExitPlanModeRequest{
				SessionID:         s.id,
				Summary:           unquote(member(params, "summary")),
				PlanContent:       unquote(member(params, "planContent")),
				RecommendedAction: unquote(member(params, "recommendedAction")),
			}
			_ = json.Unmarshal(member(params, "actions"), &r.Actions) // what cannot be read is missing: the user is asked all the same
			if r.RecommendedAction == "" {
				r.RecommendedAction = "autopilot"
			}
			return h(ctx, r)
		},
		reply: func(result any, err error) (any, error) {
			if err != nil {
				return ExitPlanModeResult{}, nil
			}
			return result, nil
		},
	}
}

// AutoModeSwitchRequest asks whether another model may take over after a rate limit.
type AutoModeSwitchRequest struct {
	SessionID  string
	ErrorCode  string
	RetryAfter time.Duration // when the model can be used again; 0 when that is not known
}

// AutoModeSwitchResponse is the answer to an [AutoModeSwitchRequest]. Anything unknown means no.
type AutoModeSwitchResponse string

// The answers to an [AutoModeSwitchRequest].
const (
	AutoModeYes       AutoModeSwitchResponse = "yes"
	AutoModeYesAlways AutoModeSwitchResponse = "yes_always"
	AutoModeNo        AutoModeSwitchResponse = "no"
)

func (s *Session) autoModeSwitchJob(params json.RawMessage) job {
	j := job{scope: turnScope, observer: EventAutoModeSwitchCompleted, reply: func(result any, err error) (any, error) {
		answer, _ := result.(AutoModeSwitchResponse)
		if err != nil || answer != AutoModeYes && answer != AutoModeYesAlways {
			answer = AutoModeNo
		}
		return map[string]any{"response": answer}, nil
	}}
	if h := s.host.autoModeSwitch; h != nil {
		j.run = func(ctx context.Context) (any, error) {
			seconds, _ := strconv.ParseFloat(string(member(params, "retryAfterSeconds")), 64)
			wait := time.Duration(min(max(seconds, 0), 1e9) * float64(time.Second))
			return h(ctx, AutoModeSwitchRequest{SessionID: s.id, ErrorCode: unquote(member(params, "errorCode")), RetryAfter: wait})
		}
	}
	return j
}

// ---- MCP servers ----

// MCPAuthRequest says that an MCP server wants a token. Printing it shows no secret.
type MCPAuthRequest struct {
	SessionID        string               `json:"-"`
	RequestID        string               `json:"requestId"`
	ServerName       string               `json:"serverName"`
	ServerURL        string               `json:"serverUrl"`
	Reason           string               `json:"reason"` // initial, refresh, reauth, upscope
	Client           *MCPAuthClient       `json:"staticClientConfig,omitempty"`
	Challenge        *MCPAuthChallenge    `json:"wwwAuthenticateParams,omitempty"`
	Response         *MCPAuthHTTPResponse `json:"httpResponse,omitempty"`
	ResourceMetadata string               `json:"resourceMetadata,omitempty"` // JSON text, RFC 9728
}

// MCPAuthClient is the OAuth client that the server's configuration names.
type MCPAuthClient struct {
	ClientID     string `json:"clientId"`
	ClientSecret string `json:"clientSecret,omitempty,secret"`
	PublicClient bool   `json:"publicClient,omitempty"`
	GrantType    string `json:"grantType,omitempty"` // client_credentials or ""
	Scope        string `json:"scope,omitempty"`
}

// MCPAuthChallenge is what the server's WWW-Authenticate header said.
type MCPAuthChallenge struct {
	ResourceMetadataURL string `json:"resourceMetadataUrl,omitempty"`
	Scope               string `json:"scope,omitempty"`
	Error               string `json:"error,omitempty"`
}

// MCPAuthHTTPResponse is the answer by which the server refused.
type MCPAuthHTTPResponse struct {
	StatusCode int             `json:"statusCode"`
	Headers    []MCPAuthHeader `json:"headers"`
	Body       string          `json:"body,omitempty"`
}

// MCPAuthHeader is one header of an [MCPAuthHTTPResponse].
type MCPAuthHeader struct {
	Name  string `json:"name"`
	Value string `json:"value,secret"`
}

// Format prints r without its secrets, for every verb.
func (r MCPAuthRequest) Format(f fmt.State, verb rune) { formatMasked(f, r) }

// MarshalJSON returns r without its secrets.
func (r MCPAuthRequest) MarshalJSON() ([]byte, error) { return maskedJSON(r) }

// Format prints c without its secret, for every verb.
func (c MCPAuthClient) Format(f fmt.State, verb rune) { formatMasked(f, c) }

// MarshalJSON returns c without its secret.
func (c MCPAuthClient) MarshalJSON() ([]byte, error) { return maskedJSON(c) }

// Format prints h without its value, for every verb.
func (h MCPAuthHeader) Format(f fmt.State, verb rune) { formatMasked(f, h) }

// MarshalJSON returns h without its value.
func (h MCPAuthHeader) MarshalJSON() ([]byte, error) { return maskedJSON(h) }

// MCPAuthToken is a token for an MCP server. Printing it does not show it.
type MCPAuthToken struct {
	AccessToken string        `json:"accessToken,required,secret"`
	TokenType   string        `json:"tokenType,omitempty"` // "" leaves it to the server
	ExpiresIn   time.Duration `json:"-"`                   // in whole seconds, rounded down; 0 is unknown
}

func (s *Session) mcpAuthJob(e *Event) job {
	return job{
		run: func(ctx context.Context) (any, error) {
			r := MCPAuthRequest{SessionID: s.id}
			if err := e.Decode(&r); err != nil {
				return nil, &paramsError{err}
			}
			return s.host.mcpAuth(ctx, r)
		},
		reply: func(result any, err error) (any, error) {
			var bad *paramsError
			if errors.As(err, &bad) {
				return nil, nil
			}
			token, _ := result.(*MCPAuthToken)
			answer := map[string]any{"kind": "cancelled"}
			switch {
			case err != nil || token == nil:
			case token.AccessToken == "":
				return map[string]any{"result": answer}, fmt.Errorf("%w: a token without text", errBadHandler)
			default:
				answer = map[string]any{"kind": "token", "accessToken": token.AccessToken}
				if token.TokenType != "" {
					answer["tokenType"] = token.TokenType
				}
				if token.ExpiresIn > 0 {
					answer["expiresIn"] = int64(token.ExpiresIn / time.Second)
				}
			}
			return map[string]any{"result": answer}, nil
		},
	}
}

// SamplingRequest says that an MCP server wants to use the model.
type SamplingRequest struct {
	SessionID    string
	ServerName   string
	MCPRequestID json.RawMessage // a string or number
	Request      json.RawMessage // the params of MCP's sampling/createMessage, nil when the server did not send them
}

func (s *Session) samplingJob(data json.RawMessage) job {
	return job{
		scope: turnScope,
		run: func(ctx context.Context) (any, error) {
			return s.host.sampling(ctx, SamplingRequest{
				SessionID:    s.id,
				ServerName:   unquote(member(data, "serverName")),
				MCPRequestID: member(data, "mcpRequestId"),
				Request:      member(data, "request"),
			})
		},
		reply: func(result any, err error) (any, error) {
			if err != nil || result == nil {
				return map[string]any{}, nil // declined
			}
			return map[string]any{"response": result}, nil
		},
	}
}

// ---- commands ----

// CommandCall is the use of one of the host's slash commands.
type CommandCall struct {
	SessionID string
	Name      string // without the slash
	Args      string // the rest of the line
	Text      string // the whole line
}

func (s *Session) commandJob(h func(context.Context, CommandCall) error, data json.RawMessage) job {
	return job{
		run: func(ctx context.Context) (any, error) {
			return nil, h(ctx, CommandCall{
				SessionID: s.id,
				Name:      unquote(member(data, "commandName")),
				Args:      unquote(member(data, "args")),
				Text:      unquote(member(data, "command")),
			})
		},
		reply: func(_ any, err error) (any, error) {
			if err != nil {
				return map[string]any{"error": err.Error()}, nil
			}
			return map[string]any{}, nil
		},
	}
}

// ---- sections of the system prompt ----

type promptSection struct {
	Content string `json:"content"`
}

func (s *Session) transformJob(params json.RawMessage) job {
	var wire struct {
		Sections map[string]promptSection `json:"sections"`
	}
	bad := decodeParams(params, &wire)
	if bad == nil && wire.Sections == nil {
		bad = &paramsError{errors.New("sections are missing")}
	}
	j := job{host: true, scope: turnScope, reply: func(any, error) (any, error) { return wire, bad }}
	if bad == nil && len(s.host.transforms) > 0 {
		j.run = func(ctx context.Context) (any, error) {
			for id, section := range wire.Sections {
				h := s.host.transforms[id]
				if h == nil {
					continue
				}
				protect(s.client, func() (string, error) { return h(ctx, section.Content) }, func(content string, err error) {
					if err != nil { // the section stays as it is
						s.client.log.Warn("copilot: a transform failed", "section", clip(id), "error", s.client.mask(clip(err.Error()), nil))
						return
					}
					wire.Sections[id] = promptSection{content}
				})
			}
			return nil, nil
		}
	}
	return j
}

// ---- hooks ----

// Hooks are functions that the agent calls at fixed points of its work and waits for: they should be quick, or heed ctx. Each returns its output,
// whose zero value changes nothing. An error or a panic counts as no output, except that PreToolUse denies the tool then. They are called on
// goroutines of their own, several at a time; those for sub-agents come with the id of the sub-agent's session.
type Hooks struct {
	// PreToolUse runs before each tool call: it may deny or allow it, have the user asked, and change the arguments.
	PreToolUse func(ctx context.Context, in PreToolUseInput) (PreToolUseOutput, error)
	// PreMCPToolCall runs before a call of an MCP server's tool is sent.
	PreMCPToolCall func(ctx context.Context, in PreMCPToolCallInput) (PreMCPToolCallOutput, error)
	// PostToolUse runs after each successful tool call.
	PostToolUse func(ctx context.Context, in PostToolUseInput) (PostToolUseOutput, error)
	// PostToolUseFailure runs after each tool call with a failure as result.
	PostToolUseFailure func(ctx context.Context, in PostToolUseFailureInput) (PostToolUseFailureOutput, error)
	// UserPromptSubmitted runs before a message of the user counts as sent.
	UserPromptSubmitted func(ctx context.Context, in UserPromptSubmittedInput) (UserPromptSubmittedOutput, error)
	// UserPromptTransformed runs when the runtime has added its context to the message.
	UserPromptTransformed func(ctx context.Context, in UserPromptTransformedInput) (UserPromptTransformedOutput, error)
	// SessionStart runs with the first message of a session that was created or resumed. Other hooks do not wait for it.
	SessionStart func(ctx context.Context, in SessionStartInput) (SessionStartOutput, error)
	// SessionEnd runs while the session is being released.
	SessionEnd func(ctx context.Context, in SessionEndInput) (SessionEndOutput, error)
	// ErrorOccurred runs when the agent has met an error.
	ErrorOccurred func(ctx context.Context, in ErrorOccurredInput) (ErrorOccurredOutput, error)
	// AgentStop runs when an agent, or a sub-agent, is about to end its work.
	AgentStop func(ctx context.Context, in AgentStopInput) (AgentStopOutput, error)
	// SubagentStart runs when a sub-agent begins.
	SubagentStart func(ctx context.Context, in SubagentStartInput) error
	// SubagentStop runs when a sub-agent has ended.
	SubagentStop func(ctx context.Context, in SubagentStopInput) error
}

// HookInput is what every hook is told.
type HookInput struct {
	SessionID     string          `json:"sessionId"` // in a sub-agent's hooks, of its own session
	Timestamp     time.Time       `json:"-"`
	CWD           string          `json:"cwd"`
	AgentID       string          `json:"agentId"` // "" for the main agent, like the following two
	AgentType     string          `json:"agentType"`
	ParentAgentID string          `json:"parentAgentId"`
	Raw           json.RawMessage `json:"-"` // everything, as received
}

// complete fills in what encoding/json cannot.
func (in *HookInput) complete(raw json.RawMessage) {
	in.Raw = raw
	if ms, err := strconv.ParseFloat(string(member(raw, "timestamp")), 64); err == nil && ms >= 0 && ms < 1e15 {
		in.Timestamp = time.UnixMilli(int64(ms))
	}
}

// HookDecision is what a PreToolUse hook says of a tool call.
type HookDecision string

// The decisions of a PreToolUse hook. "" leaves the call to the usual permission.
const (
	HookAllow HookDecision = "allow" // without asking for permission
	HookDeny  HookDecision = "deny"
	HookAsk   HookDecision = "ask" // a permission of kind "hook"
)

// PreToolUseInput is the input of Hooks.PreToolUse.
type PreToolUseInput struct {
	HookInput
	ToolName string          `json:"toolName"`
	ToolArgs json.RawMessage `json:"toolArgs"`
}

// PreToolUseOutput is the output of Hooks.PreToolUse.
type PreToolUseOutput struct {
	Decision          HookDecision `json:"permissionDecision,omitempty"`
	DecisionReason    string       `json:"permissionDecisionReason,omitempty"` // the model gets it
	ModifiedArgs      any          `json:"modifiedArgs,omitempty"`             // replaces the arguments
	AdditionalContext string       `json:"additionalContext,omitempty"`        // a further message for the model
	SuppressOutput    bool         `json:"suppressOutput,omitempty"`
}

// PreMCPToolCallInput is the input of Hooks.PreMCPToolCall.
type PreMCPToolCallInput struct {
	HookInput
	ServerName string          `json:"serverName"`
	ToolName   string          `json:"toolName"` // as the MCP server calls it
	Arguments  json.RawMessage `json:"arguments"`
	ToolCallID string          `json:"toolCallId"`
	Meta       json.RawMessage `json:"_meta"`
}

// PreMCPToolCallOutput is the output of Hooks.PreMCPToolCall.
type PreMCPToolCallOutput struct {
	// MetaToUse is an object that replaces the call's _meta, or null to remove it; nil keeps it.
	MetaToUse json.RawMessage `json:"metaToUse,omitempty"`
}

// PostToolUseInput is the input of Hooks.PostToolUse. ToolResult mostly has the form of a [ToolResult].
type PostToolUseInput struct {
	HookInput
	ToolName   string          `json:"toolName"`
	ToolArgs   json.RawMessage `json:"toolArgs"`
	ToolResult json.RawMessage `json:"toolResult"`
}

// PostToolUseOutput is the output of Hooks.PostToolUse.
type PostToolUseOutput struct {
	ModifiedResult    any    `json:"modifiedResult,omitempty"` // replaces the result; a [ToolResult] will do
	AdditionalContext string `json:"additionalContext,omitempty"`
	SuppressOutput    bool   `json:"suppressOutput,omitempty"`
}

// PostToolUseFailureInput is the input of Hooks.PostToolUseFailure.
type PostToolUseFailureInput struct {
	HookInput
	ToolName string          `json:"toolName"`
	ToolArgs json.RawMessage `json:"toolArgs"`
	Error    string          `json:"error"`
}

// PostToolUseFailureOutput is the output of Hooks.PostToolUseFailure.
type PostToolUseFailureOutput struct {
	AdditionalContext string `json:"additionalContext,omitempty"`
}

// UserPromptSubmittedInput is the input of Hooks.UserPromptSubmitted.
type UserPromptSubmittedInput struct {
	HookInput
	Prompt string `json:"prompt"`
}

// UserPromptSubmittedOutput is the output of Hooks.UserPromptSubmitted.
type UserPromptSubmittedOutput struct {
	ModifiedPrompt    string `json:"modifiedPrompt,omitempty"`
	AdditionalContext string `json:"additionalContext,omitempty"`
	SuppressOutput    bool   `json:"suppressOutput,omitempty"`
}

// UserPromptTransformedInput is the input of Hooks.UserPromptTransformed.
type UserPromptTransformedInput struct {
	HookInput
	Prompt            string `json:"prompt"`
	TransformedPrompt string `json:"transformedPrompt"`
}

// UserPromptTransformedOutput is the output of Hooks.UserPromptTransformed.
type UserPromptTransformedOutput struct {
	ModifiedTransformedPrompt string `json:"modifiedTransformedPrompt,omitempty"`
}

// SessionStartInput is the input of Hooks.SessionStart.
type SessionStartInput struct {
	HookInput
	Source        string `json:"source"` // new, startup, resume
	InitialPrompt string `json:"initialPrompt"`
}

// SessionStartOutput is the output of Hooks.SessionStart.
type SessionStartOutput struct {
	AdditionalContext string `json:"additionalContext,omitempty"`
	ModifiedConfig    any    `json:"modifiedConfig,omitempty"`
}

// SessionEndInput is the input of Hooks.SessionEnd.
type SessionEndInput struct {
	HookInput
	Reason       string          `json:"reason"` // complete, error, abort, timeout, user_exit
	FinalMessage string          `json:"finalMessage"`
	Error        json.RawMessage `json:"error"`
}

// SessionEndOutput is the output of Hooks.SessionEnd.
type SessionEndOutput struct {
	SuppressOutput bool     `json:"suppressOutput,omitempty"`
	CleanupActions []string `json:"cleanupActions,omitempty"`
	SessionSummary string   `json:"sessionSummary,omitempty"`
}

// ErrorOccurredInput is the input of Hooks.ErrorOccurred.
type ErrorOccurredInput struct {
	HookInput
	ErrorName    string `json:"-"` // "" from servers that send the message only
	ErrorMessage string `json:"-"`
	ErrorContext string `json:"errorContext"` // model_call, tool_execution, system, user_input
	Recoverable  bool   `json:"recoverable"`
}

func (in *ErrorOccurredInput) complete(raw json.RawMessage) {
	in.HookInput.complete(raw)
	if in.ErrorMessage = unquote(member(raw, "error")); in.ErrorMessage == "" {
		in.ErrorName = unquote(member(member(raw, "error"), "name"))
		in.ErrorMessage = unquote(member(member(raw, "error"), "message"))
	}
}

// ErrorOccurredOutput is the output of Hooks.ErrorOccurred.
type ErrorOccurredOutput struct {
	SuppressOutput   bool   `json:"suppressOutput,omitempty"`
	ErrorHandling    string `json:"errorHandling,omitempty"` // retry, skip, abort
	RetryCount       int    `json:"retryCount,omitempty"`
	UserNotification string `json:"userNotification,omitempty"`
}

// AgentStopInput is the input of Hooks.AgentStop.
type AgentStopInput struct {
	HookInput
	StopReason     string `json:"stopReason"`
	TranscriptPath string `json:"transcriptPath"`
	StopHookActive bool   `json:"stop_hook_active"` // a hook has kept the agent going already
}

// AgentStopOutput is the output of Hooks.AgentStop.
type AgentStopOutput struct {
	Decision string `json:"decision,omitempty"` // "block" keeps the agent going
	Reason   string `json:"reason,omitempty"`   // with "block": the agent's next message
}

// SubagentStartInput is the input of Hooks.SubagentStart.
type SubagentStartInput struct {
	HookInput
	AgentName      string `json:"agentName"`
	TranscriptPath string `json:"transcriptPath"`
}

// SubagentStopInput is the input of Hooks.SubagentStop.
type SubagentStopInput struct {
	HookInput
	AgentName      string          `json:"agentName"`
	TranscriptPath string          `json:"transcriptPath"`
	StopReason     string          `json:"stopReason"`
	Response       json.RawMessage `json:"response"`
	StopHookActive bool            `json:"stop_hook_active"`
}

// HookCall is a hook that [Hooks] has no function for.
type HookCall struct {
	SessionID string
	Type      string          // such as "preToolUse", or one that is younger than this package
	Input     json.RawMessage // as received
}

// hookFunc is any hook: from raw input to output.
type hookFunc func(ctx context.Context, input json.RawMessage) (any, error)

// typed makes a hookFunc, nil for nil.
func typed[I, O any, P interface {
	*I
	complete(raw json.RawMessage)
}](f func(ctx context.Context, in I) (O, error)) hookFunc {
	if f == nil {
		return nil
	}
	return func(ctx context.Context, raw json.RawMessage) (any, error) {
		var in I
		if err := decodeParams(raw, &in); err != nil {
			return nil, err
		}
		P(&in).complete(raw)
		return f(ctx, in)
	}
}

// silent makes a hook without an output one with an empty one.
func silent[I any](f func(ctx context.Context, in I) error) func(ctx context.Context, in I) (struct{}, error) {
	if f == nil {
		return nil
	}
	return func(ctx context.Context, in I) (struct{}, error) { return struct{}{}, f(ctx, in) }
}

// of returns the function for a type of hook, nil where there is none.
func (h *Hooks) of(hookType string) hookFunc {
	switch hookType {
	case "preToolUse":
		return typed(h.PreToolUse)
	case "preMcpToolCall":
		return typed(h.PreMCPToolCall)
	case "postToolUse":
		return typed(h.PostToolUse)
	case "postToolUseFailure":
		return typed(h.PostToolUseFailure)
	case "userPromptSubmitted":
		return typed(h.UserPromptSubmitted)
	case "userPromptTransformed":
		return typed(h.UserPromptTransformed)
	case "sessionStart":
		return typed(h.SessionStart)
	case "sessionEnd":
		return typed(h.SessionEnd)
	case "errorOccurred":
		return typed(h.ErrorOccurred)
	case "agentStop":
		return typed(h.AgentStop)
	case "subagentStart":
		return typed(silent(h.SubagentStart))
	case "subagentStop":
		return typed(silent(h.SubagentStop))
	}
	return nil
}

func (s *Session) hookJob(params json.RawMessage) job {
	hookType, input := unquote(member(params, "hookType")), json.RawMessage(member(params, "input"))
	f := s.host.hooks.of(hookType)
	if h := s.host.hook; f == nil && h != nil && hookType != "" {
		f = func(ctx context.Context, input json.RawMessage) (any, error) {
			return h(ctx, HookCall{SessionID: s.id, Type: hookType, Input: input})
		}
	}
	if f == nil {
		s.client.conn.log.Debug("copilot: a hook without a handler", "type", clip(hookType))
		return job{reply: func(any, error) (any, error) { return hookAnswer(nil), nil }}
	}
	scope := turnScope
	if hookType == "sessionEnd" {
		scope = serviceScope // the release that would end it waits for it
	}
	return job{host: true, scope: scope,
		run: func(ctx context.Context) (any, error) {
			out, err := f(ctx, input)
			if err != nil {
				return nil, err
			}
			return hookOutput(hookType, out)
		},
		reply: func(result any, err error) (any, error) {
			out, _ := result.(json.RawMessage)
			if err != nil && hookType == "preToolUse" {
				out, err = marshal(PreToolUseOutput{Decision: HookDeny, DecisionReason: err.Error()})
			}
			return hookAnswer(out), nil
		},
	}
}

func hookAnswer(out json.RawMessage) any {
	if out == nil {
		return map[string]any{"output": struct{}{}}
	}
	return map[string]any{"output": out}
}

// hookOutput encodes an output. The server takes what it does not understand for no output, which would let a tool pass that was to be stopped: so
// that is an error here.
func hookOutput(hookType string, out any) (json.RawMessage, error) {
	raw, err := marshal(out)
	if err != nil || string(raw) == "null" {
		return nil, err
	}
	s := scanner{b: raw}
	if s.peek() != '{' {
		return nil, fmt.Errorf("%w: the output is no object", errBadHandler)
	}
	if decision := member(raw, "permissionDecision"); decision != nil && hookType == "preToolUse" {
		switch HookDecision(unquote(decision)) {
		case HookAllow, HookDeny, HookAsk:
		default:
			return nil, fmt.Errorf("%w: unknown decision %s", errBadHandler, quoted(decision))
		}
	}
	return raw, nil
}

// ---- schemas ----

// SchemaFor returns the JSON Schema of the values that decode into T, by the rules of package encoding/json, as [Tool].Parameters needs it. A field is
// required unless its tag says omitempty or omitzero, or it is a pointer. The tag description:"..." describes it; enum:"a,b" lists the values
// of a string or number, or of a list's or pointer's elements. A [time.Time] is a date-time; types with their own text form are strings, those
// with their own JSON, json.RawMessage and interfaces anything; a []byte is base64 text. A recursive type refers to itself. Errors
// match ErrInvalidConfig: channels, functions and complex numbers have no schema.
func SchemaFor[T any]() (json.RawMessage, error) {
	schema, _, err := schemaOf(reflect.TypeFor[T]())
	return schema, err
}

// argumentsSchema is the schema of a tool's arguments, which must be an object.
func argumentsSchema(t reflect.Type) (json.RawMessage, error) {
	raw, top, err := schemaOf(t)
	if err == nil && top != "object" && top != "" {
		err = fmt.Errorf("%w: arguments of type %v are no object", ErrInvalidConfig, t)
	}
	return raw, err
}

// schemaOf returns the schema and its outermost type.
func schemaOf(t reflect.Type) (json.RawMessage, string, error) {
	b := schemaBuilder{open: make(map[reflect.Type]bool), names: make(map[reflect.Type]string)}
	b.root = dereferenced(t)
	s, err := b.of(t)
	if err != nil {
		return nil, "", fmt.Errorf("%w: schema of %v: %w", ErrInvalidConfig, t, err)
	}
	s.Defs = b.defs
	raw, err := marshal(s)
	return raw, s.Type, err
}

// schema is the part of JSON Schema that is needed here.
type schema struct {
	Ref                  string      `json:"$ref,omitempty"`
	Type                 string      `json:"type,omitempty"`
	Format               string      `json:"format,omitempty"`
	ContentEncoding      string      `json:"contentEncoding,omitempty"`
	Description          string      `json:"description,omitempty"`
	Enum                 []any       `json:"enum,omitempty"`
	Properties           *properties `json:"properties,omitempty"`
	Required             []string    `json:"required,omitempty"`
	AdditionalProperties *schema     `json:"additionalProperties,omitempty"`
	Items                *schema     `json:"items,omitempty"`
	MinItems             *int        `json:"minItems,omitempty"`
	MaxItems             *int        `json:"maxItems,omitempty"`
	Defs                 properties  `json:"$defs,omitempty"`
}

// properties is a JSON object that keeps its order.
type properties []namedSchema

type namedSchema struct {
	name   string
	schema *schema
}

func (m properties) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, p := range m {
		if i > 0 {
			b = append(b, ',')
		}
		raw, err := marshal(p.schema)
		if err != nil {
			return nil, err
		}
		b = append(append(appendQuoted(b, p.name), ':'), raw...)
	}
	return append(b, '}'), nil
}

// schemaBuilder makes the schema of one type and of what that is made of.
type schemaBuilder struct {
	root  reflect.Type
	open  map[reflect.Type]bool   // named types that are being built: whoever meets one again refers to it
	names map[reflect.Type]string // of those that somebody refers to
	defs  properties
}

// dereferenced returns what t points to, however deep; a pointer type only where pointers lead to nothing else.
func dereferenced(t reflect.Type) reflect.Type {
	for range 16 {
		if t.Kind() != reflect.Pointer {
			break
		}
		t = t.Elem()
	}
	return t
}

func (b *schemaBuilder) of(t reflect.Type) (*schema, error) {
	t = dereferenced(t)
	if s := knownSchema(t); s != nil {
		return s, nil
	}
	if b.open[t] {
		return &schema{Ref: b.reference(t)}, nil
	}
	if t.Name() == "" {
		return b.build(t)
	}
	b.open[t] = true
	s, err := b.build(t)
	delete(b.open, t)
	if name := b.names[t]; err == nil && name != "" {
		if !slices.ContainsFunc(b.defs, func(d namedSchema) bool { return d.name == name }) {
			b.defs = append(b.defs, namedSchema{name, s})
		}
		s = &schema{Ref: "#/$defs/" + name}
	}
	return s, err
}

// reference returns where the schema of a type that is being built will stand.
func (b *schemaBuilder) reference(t reflect.Type) string {
	if t == b.root {
		return "#"
	}
	if b.names[t] == "" {
		clean := strings.Map(func(r rune) rune {
			if isName(string(r)) {
				return r
			}
			return '_'
		}, t.Name())
		name := clean
		for i := 2; b.taken(name); i++ {
			name = clean + strconv.Itoa(i)
		}
		b.names[t] = name
	}
	return "#/$defs/" + b.names[t]
}

func (b *schemaBuilder) taken(name string) bool {
	for _, n := range b.names {
		if n == name {
			return true
		}
	}
	return false
}

// knownSchema is the schema of types whose JSON is not that of their kind, nil for others.
func knownSchema(t reflect.Type) *schema {
	implements := func(i reflect.Type) bool { return t.Implements(i) || reflect.PointerTo(t).Implements(i) }
	switch {
	case t == reflect.TypeFor[time.Time]():
		return &schema{Type: "string", Format: "date-time"}
	case t == reflect.TypeFor[json.Number]():
		return &schema{Type: "number"}
	case t == reflect.TypeFor[json.RawMessage](), t.Kind() == reflect.Interface && t.NumMethod() == 0:
		return &schema{}
	case t.Kind() == reflect.Interface:
		return nil
	case implements(reflect.TypeFor[json.Unmarshaler]()), implements(reflect.TypeFor[json.Marshaler]()):
		return &schema{}
	case implements(reflect.TypeFor[encoding.TextUnmarshaler]()), implements(reflect.TypeFor[encoding.TextMarshaler]()):
		return &schema{Type: "string"}
	}
	return nil
}

func (b *schemaBuilder) build(t reflect.Type) (*schema, error) {
	switch t.Kind() {
	case reflect.Bool:
		return &schema{Type: "boolean"}, nil
	case reflect.String:
		return &schema{Type: "string"}, nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uintptr:
		return &schema{Type: "integer"}, nil
	case reflect.Float32, reflect.Float64:
		return &schema{Type: "number"}, nil
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 && knownSchema(t.Elem()) == nil {
			return &schema{Type: "string", ContentEncoding: "base64"}, nil
		}
		items, err := b.of(t.Elem())
		return &schema{Type: "array", Items: items}, err
	case reflect.Array:
		items, err := b.of(t.Elem())
		n := t.Len()
		return &schema{Type: "array", Items: items, MinItems: &n, MaxItems: &n}, err
	case reflect.Map:
		switch k := t.Key(); {
		case k.Kind() == reflect.String, reflect.Int <= k.Kind() && k.Kind() <= reflect.Uintptr,
			reflect.PointerTo(k).Implements(reflect.TypeFor[encoding.TextUnmarshaler]()):
		default:
			return nil, fmt.Errorf("keys of type %v", k)
		}
		values, err := b.of(t.Elem())
		return &schema{Type: "object", AdditionalProperties: values}, err
	case reflect.Struct:
		return b.object(t)
	}
	return nil, fmt.Errorf("%v has no JSON", t)
}

func (b *schemaBuilder) object(t reflect.Type) (*schema, error) {
	s := &schema{Type: "object", Properties: new(properties)}
	for _, f := range jsonFields(t) {
		property, err := b.field(f)
		if err != nil {
			return nil, fmt.Errorf("field %s: %w", f.Name, err)
		}
		*s.Properties = append(*s.Properties, namedSchema{f.json, property})
		if !f.optional {
			s.Required = append(s.Required, f.json)
		}
	}
	return s, nil
}

func (b *schemaBuilder) field(f jsonField) (*schema, error) {
	s, err := b.of(f.Type)
	if err != nil {
		return nil, err
	}
	elem := s
	if list := f.Tag.Get("enum"); list != "" {
		if s.Items != nil {
			elem = s.Items
		}
		for _, text := range strings.Split(list, ",") {
			switch elem.Type {
			case "string":
				elem.Enum = append(elem.Enum, text)
			case "integer", "number":
				n := json.Number(text)
				if _, err := n.Float64(); err != nil {
					return nil, fmt.Errorf("enum: %.64q is no number", text)
				}
				elem.Enum = append(elem.Enum, n)
			default:
				return nil, errors.New("enum is for strings and numbers")
			}
		}
	}
	switch {
	case !f.quoted:
	case s.Type == "integer", s.Type == "number", s.Type == "boolean", s.Type == "string":
		s.Type = "string" // the value in quotes
		for i, v := range s.Enum {
			s.Enum[i] = fmt.Sprint(v)
		}
	}
	s.Description = f.Tag.Get("description")
	return s, nil
}

// jsonField is a field that package encoding/json knows, under the name it has there.
type jsonField struct {
	reflect.StructField
	json     string
	optional bool
	quoted   bool // by the string option
	tagged   bool
	depth    int
}

// jsonFields returns the fields of a struct as package encoding/json sees them: those of embedded structs among its own, and of several under one
// name the least deep one, a tagged one first, or none.
func jsonFields(t reflect.Type) []jsonField {
	var all []jsonField
	var walk func(t reflect.Type, depth int, optional bool, path []reflect.Type)
	walk = func(t reflect.Type, depth int, optional bool, path []reflect.Type) {
		if slices.Contains(path, t) {
			return
		}
		for i := range t.NumField() {
			f := t.Field(i)
			tag := f.Tag.Get("json")
			name, options, _ := strings.Cut(tag, ",")
			if tag == "-" {
				continue
			}
			embedded, pointer := f.Type, f.Type.Kind() == reflect.Pointer
			if pointer {
				embedded = f.Type.Elem()
			}
			if f.Anonymous && name == "" && embedded.Kind() == reflect.Struct {
				if pointer && !f.IsExported() {
					continue // cannot be set
				}
				walk(embedded, depth+1, optional || pointer, append(slices.Clone(path), t))
				continue
			}
			if !f.IsExported() {
				continue
			}
			opts := strings.Split(options, ",")
			field := jsonField{
				StructField: f, json: name, tagged: name != "", depth: depth,
				optional: optional || pointer || slices.Contains(opts, "omitempty") || slices.Contains(opts, "omitzero"),
				quoted:   slices.Contains(opts, "string"),
			}
			if name == "" {
				field.json = f.Name
			}
			all = append(all, field)
		}
	}
	walk(t, 0, false, nil)
	better := func(a, b jsonField) bool { return a.depth < b.depth || a.depth == b.depth && a.tagged && !b.tagged }
	var visible []jsonField
	for i, f := range all {
		hidden := false
		for j, other := range all {
			hidden = hidden || i != j && f.json == other.json && !better(f, other)
		}
		if !hidden {
			visible = append(visible, f)
		}
	}
	return visible
}
