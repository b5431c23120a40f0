package copilot

// This file decides which session a message belongs to, and runs what the host was asked to do.
//
// Its one idea: the reader parses, routes and publishes, in wire order, and never waits; whatever may take time, a handler's
// call above all, runs on a goroutine of its own under a context that ends with its reason to run.

import (
	"bufio"
	"bytes"
	"context"
	"encoding"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

// route is where the messages of one session id go: to a session, or to a watch.
type route struct {
	session *Session
	watch   *SharedSessionWatch
}

func (r route) end(cause error) {
	if r.watch != nil {
		r.watch.end(cause)
		return
	}
	r.session.end(cause)
}

// release asks the server to let go of what the route holds; nil when there is nothing on the server yet.
func (r route) release() *release {
	if r.watch != nil {
		return r.watch.release()
	}
	return r.session.leave(errStopping)
}

// lookup returns the route for a raw session id of the wire.
func (c *Client) lookup(raw []byte) (r route) {
	if len(raw) < 2 || raw[0] != '"' {
		return r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r, ok := c.routes[string(raw[1:len(raw)-1])]
	if !ok {
		r = c.routes[unquote(raw)] // with escapes, which ids have no need of
	}
	if r.session != nil && !r.session.live {
		return route{} // what comes now belongs to an earlier session of that id
	}
	return r
}

// dispatch gets every request and notification, on the reader, in wire order.
func (c *Client) dispatch(m *message) {
	switch {
	case m.id != nil:
		c.serve(m)
	case string(m.method) == `"session.event"`:
		c.event(m)
	case string(m.method) == `"session.lifecycle"`:
		c.lifecycleNotice(m)
	default:
		c.notice(unquote(m.method), m)
	}
}

// event publishes a session event. Events of sessions that are not open here are dropped.
func (c *Client) event(m *message) {
	if m.event == nil || m.event[0] != '{' {
		c.conn.log.Debug("copilot: dropped a session event without an event")
		return
	}
	switch r := c.lookup(m.sessionID); {
	case r.watch != nil:
		r.watch.deliver(newEvent(&m.fields, c.types))
	case r.session != nil:
		r.session.deliver(newEvent(&m.fields, c.types))
	}
}

// notice serves a notification other than events: by name, or not at all.
func (c *Client) notice(method string, m *message) {
	switch {
	case method == "$/cancelRequest":
		c.cancelRequest(member(m.params, "id"))
		return
	case method == "gitHubTelemetry.event" && c.opts.OnGitHubTelemetry != nil:
		c.host.telemetry.push(c, m.params)
		return
	}
	s := c.lookup(m.sessionID).session
	if h := c.custom(s, method); h != nil {
		params := m.params
		j := job{run: func(ctx context.Context) (any, error) { return h(ctx, method, params) }}
		c.newTask(s, j, "").start(func(any, error) {})
	}
}

// custom returns the host's own handler for a method, which goes before this package's.
func (c *Client) custom(s *Session, method string) HandlerFunc {
	if s != nil {
		if h := s.host.custom[method]; h != nil {
			return h
		}
	}
	return c.opts.Handlers[method]
}

// serve answers a request of the server: by a handler on a goroutine of its own, or at once when there is nothing to run.
func (c *Client) serve(m *message) {
	id, method, params := m.id, unquote(m.method), m.params
	if method == "" {
		c.conn.replyNow(id, nil, &RPCError{Code: codeInvalidRequest, Message: "method is missing"})
		return
	}
	s := c.lookup(m.sessionID).session
	var j job
	if h := c.custom(s, method); h != nil {
		j.run = func(ctx context.Context) (any, error) { return h(ctx, method, params) }
	} else if strings.HasPrefix(method, "llmInference.httpRequest") {
		c.serveModel(s, method, m)
		return
	} else if request := c.directRequest(method); request == nil {
		c.conn.replyNow(id, nil, &RPCError{Code: codeMethodNotFound, Message: "method not found: " + clip(method)})
		return
	} else if s == nil && method != "gitHubToken.getToken" {
		c.conn.replyNow(id, nil, &RPCError{Code: codeInvalidParams, Message: "no such session here"})
		return
	} else {
		j = request(s, params)
	}
	if j.run == nil {
		result, err := j.reply(nil, errNoHandler)
		c.conn.replyNow(id, result, refusal(err))
		return
	}
	sets := []*tasks{&c.requests}
	if s != nil {
		sets = append(sets, &s.tasks)
	}
	c.newTask(s, j, requestKey(id), sets...).start(func(result any, err error) {
		if j.reply != nil {
			result, err = j.reply(result, err)
		}
		if err := c.conn.reply(id, result, refusal(err)); err != nil {
			c.log.Debug("copilot: an answer was not sent", "error", err)
		}
	})
}

// refusal is the error answer for a handler's error: the handler's own where it is one.
func refusal(err error) *RPCError {
	var rpc *RPCError
	var params *paramsError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &rpc):
		return rpc
	case errors.As(err, &params):
		return &RPCError{Code: codeInvalidParams, Message: clip(err.Error())}
	}
	return &RPCError{Code: codeInternal, Message: err.Error()}
}

// cancelRequest ends the context of a direct request in flight and answers it. What its handler says later is dropped.
func (c *Client) cancelRequest(id []byte) {
	if t := c.requests.get(requestKey(id)); t != nil && t.settle() {
		t.cancel(errCancelled)
		c.conn.replyNow(id, nil, &RPCError{Code: codeCancelled, Message: "cancelled"})
	}
}

func requestKey(id []byte) string { return "request " + string(id) }

// Why the contexts of handlers end, besides ErrAborted and the end of session or client; and why one has no result.
var (
	errResolved   = errors.New("copilot: the request was resolved elsewhere")
	errCancelled  = errors.New("copilot: the server cancelled the request")
	errLeaving    = fmt.Errorf("%w: the session is being released", ErrClosed)
	errStopping   = fmt.Errorf("%w: the client is being stopped", ErrClosed)
	errNoHandler  = errors.New("no handler")
	errPanic      = errors.New("the host's handler panicked")
	errRefused    = errors.New("the server did not accept the host's answer")
	errFlood      = fmt.Errorf("copilot: the server asks without end: %d handler calls wait", maxWaiting)
	errBadHandler = errors.New("the host's handler gave no valid answer")
)

// scope is what, besides its own resolution and the end of its session or client, ends the context of a handler call.
type scope int

const (
	sessionScope scope = iota // the session's release, as soon as that is asked for
	turnScope                 // that, and an abort of the turn
	serviceScope              // nothing: the server needs it until it has released the session
)

// job is what a request of the server, or an event that asks for an answer, wants of the host.
type job struct {
	host     bool      // of the class of calls that the server needs before it can answer others
	scope    scope     // what ends its context
	agent    string    // the sub-agent it is for, "" for the main agent
	observer EventType // for a direct request, the event that tells its end; "" when there is none
	// run calls the host's code; nil when the host has none for this.
	run func(ctx context.Context) (any, error)
	// reply makes the answer of what run returned: the result of a direct request, or the params of the call that answers an
	// event, where nil answers nothing. A nil reply leaves it as it is.
	reply func(result any, err error) (any, error)
}

// task is one handler call, from being asked for to the return of the handler.
type task struct {
	job
	client  *Client
	session *Session // nil when none is concerned
	key     string   // names it in the sets
	sets    []*tasks // where it can be found while it is in flight
	ctx     context.Context
	cancel  context.CancelCauseFunc
	settled atomic.Bool
}

func (c *Client) newTask(s *Session, j job, key string, sets ...*tasks) *task {
	t := &task{job: j, client: c, session: s, key: key, sets: sets}
	parent := c.ctx
	if s != nil {
		parent = s.ctx
	}
	t.ctx, t.cancel = context.WithCancelCause(parent)
	return t
}

// settle reports, once, that the answer is the caller's to give.
func (t *task) settle() bool { return !t.settled.Swap(true) }

// start runs the task on a goroutine of its own, in order under its class's limit. done gets the outcome unless the task was settled
// meanwhile.
func (t *task) start(done func(result any, err error)) {
	c := t.client
	for _, set := range t.sets {
		set.add(t)
	}
	work := &c.agentWork
	if t.host {
		work = &c.hostWork
	}
	if !work.run(func() {
		defer t.finish()
		protect(c, func() (any, error) {
			if t.ctx.Err() != nil { // it has lost its reason while it waited
				return nil, context.Cause(t.ctx)
			}
			return t.run(t.ctx)
		}, func(result any, err error) {
			if err != nil && t.ctx.Err() == nil {
				c.log.Debug("copilot: a handler failed", "error", c.mask(clip(err.Error()), nil))
			}
			if !t.settle() {
				return
			}
			if t.observer != "" && t.ctx.Err() == nil {
				t.session.tasks.expect(t.observer)
			}
			done(result, err)
		})
	}) {
		t.finish()
		c.conn.fail(errFlood)
	}
}

func (t *task) finish() {
	for _, set := range t.sets {
		set.remove(t)
	}
	t.cancel(nil)
}

// tasks are handler calls in flight: those of a session, or the direct requests to the client.
type tasks struct {
	mu       sync.Mutex
	byKey    map[string]*task
	recent   []string          // keys of events that were dealt with lately
	expected map[EventType]int // events that tell the end of requests which we have answered ourselves
}

const maxRecent = 128

func (s *tasks) add(t *task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byKey == nil {
		s.byKey = make(map[string]*task)
	}
	s.byKey[t.key] = t
}

func (s *tasks) remove(t *task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byKey[t.key] == t {
		delete(s.byKey, t.key)
	}
}

func (s *tasks) get(key string) *task {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byKey[key]
}

// first reports whether this key is new, and remembers it. Servers and transports may repeat themselves.
func (s *tasks) first(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byKey[key] != nil || slices.Contains(s.recent, key) {
		return false
	}
	if len(s.recent) == maxRecent {
		s.recent = append(s.recent[:0], s.recent[1:]...)
	}
	s.recent = append(s.recent, key)
	return true
}

// resolve ends a task that was answered elsewhere. Its handler's answer is dropped.
func (s *tasks) resolve(key string) {
	if t := s.get(key); t != nil {
		t.settle()
		t.cancel(errResolved)
	}
}

// expect notes that the server will tell of a request's end because of our answer.
func (s *tasks) expect(observer EventType) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.expected == nil {
		s.expected = make(map[EventType]int)
	}
	s.expected[observer]++
}

// observe takes an event that tells the end of a direct request without naming it. Unless that was our own doing it ends the context of the
// one such request in flight; where there are several, nobody can tell. The request itself still wants its answer.
func (s *tasks) observe(observer EventType) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.expected[observer] > 0 {
		s.expected[observer]--
		return
	}
	var found []*task
	for _, t := range s.byKey {
		if t.observer == observer && !t.settled.Load() { // one that is settled was answered, and is just about to leave
			found = append(found, t)
		}
	}
	if len(found) == 1 {
		found[0].cancel(errResolved)
	}
}

// ofTurn returns the tasks that an abort by this agent ends; the main agent's ends those of all agents.
func (s *tasks) ofTurn(agent string) (found []*task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.byKey {
		if t.scope == turnScope && (agent == "" || agent == t.agent) {
			found = append(found, t)
		}
	}
	return found
}

// release ends the contexts that a session's release ends.
func (s *tasks) release(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.byKey {
		if t.scope != serviceScope {
			t.cancel(cause)
		}
	}
}

func cancelTasks(list []*task, cause error) {
	for _, t := range list {
		t.cancel(cause)
	}
}

const maxWaiting = 65536 // handler calls of one class that wait, beyond those that run

// limiter runs functions on goroutines of their own, at most max at once. Further ones wait in order, without a goroutine.
type limiter struct {
	max     int
	mu      sync.Mutex
	running int
	waiting []func()
}

// run reports false, and does nothing, when too many wait already.
func (l *limiter) run(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running < l.max {
		l.running++
		go l.work(f) // owned by the client; ends with f. Nobody waits for it: f may be the one that stops the client
		return true
	}
	if len(l.waiting) == maxWaiting {
		return false
	}
	l.waiting = append(l.waiting, f)
	return true
}

func (l *limiter) work(f func()) {
	defer l.next() // deferred, since f may end the goroutine with runtime.Goexit
	f()
}

func (l *limiter) next() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		l.running--
		return
	}
	f := l.waiting[0]
	l.waiting[0] = nil
	l.waiting = l.waiting[1:]
	go l.work(f) // as in run
}

// protect calls host code and hands its outcome to done, once, also when it panics or ends its goroutine.
func protect[T any](c *Client, f func() (T, error), done func(T, error)) {
	var result T
	err := errPanic
	returned := false
	defer func() {
		if !returned {
			why := "runtime.Goexit"
			if p := recover(); p != nil {
				why = fmt.Sprint(p)
			}
			c.log.Error("copilot: a handler panicked", "panic", c.mask(clip(why), nil), "stack", string(debug.Stack()))
		}
		done(result, err)
	}()
	result, err = f()
	returned = true
}

// paramsError says that the params of a request, or the data of an event, do not fit.
type paramsError struct{ err error }

func (e *paramsError) Error() string { return "params: " + e.err.Error() }
func (e *paramsError) Unwrap() error { return e.err }

// decodeParams unmarshals what came with a request. Absent and null count as an empty object.
func decodeParams(params json.RawMessage, v any) error {
	if len(params) == 0 || string(params) == "null" {
		params = json.RawMessage("{}")
	}
	if err := json.Unmarshal(params, v); err != nil {
		return &paramsError{err}
	}
	return nil
}

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

// react starts the handlers that an event asks for, and ends the contexts of those whose reason to run it takes away. It runs on
// the reader, after subscribers can see the event. What nobody here handles is left to other clients of the session.
func (s *Session) react(e *Event) {
	switch e.Type {
	case EventPermissionRequested:
		if s.host.permission != nil && string(member(e.Data, "resolvedByHook")) != "true" {
			s.ask(e, methodPermissionAnswer, s.permissionJob(e.Data, e.AgentID))
		}
	case EventExternalToolRequested:
		if h := s.host.tools[unquote(member(e.Data, "toolName"))]; h != nil {
			s.ask(e, methodToolAnswer, s.toolJob(h, e.Data, e.AgentID))
		}
	case EventElicitationRequested:
		if s.host.elicitation != nil {
			s.ask(e, "session.ui.handlePendingElicitation", s.elicitationJob(*e))
		}
	case EventCommandExecute:
		if h := s.host.commands[unquote(member(e.Data, "commandName"))]; h != nil {
			s.ask(e, "session.commands.handlePendingCommand", s.commandJob(h, e.Data))
		}
	case EventMCPOAuthRequired:
		if s.host.mcpAuth != nil {
			s.ask(e, "session.mcp.oauth.handlePendingRequest", s.mcpAuthJob(*e))
		}
	case EventSamplingRequested:
		if s.host.sampling != nil {
			s.ask(e, "session.ui.handlePendingSampling", s.samplingJob(e.Data))
		}
	case EventPermissionCompleted, EventExternalToolCompleted, EventElicitationCompleted, EventCommandCompleted,
		EventMCPOAuthCompleted, EventSamplingCompleted:
		s.tasks.resolve(eventKey(e.Type, exactText(member(e.Data, "requestId"))))
	case EventUserInputCompleted, EventExitPlanModeCompleted, EventAutoModeSwitchCompleted:
		s.tasks.observe(e.Type)
	case EventAbort:
		cancelTasks(s.tasks.ofTurn(e.AgentID), ErrAborted)
	}
}

// The answers that a handler gives, and that the host can give by a call of its own, see [Session.AnswerToolCall].
const (
	methodToolAnswer       = "session.tools.handlePendingToolCall"
	methodPermissionAnswer = "session.permissions.handlePendingPermissionRequest"
)

// eventKey names what an event asks for and what another one later calls completed.
func eventKey(t EventType, requestID string) string {
	topic, _, _ := strings.Cut(string(t), ".")
	return topic + " " + requestID
}

// ask runs the job of an event that wants an answer, once, and answers by calling method.
func (s *Session) ask(e *Event, method string, j job) {
	raw := member(e.Data, "requestId")
	id := exactText(raw)
	key := eventKey(e.Type, id)
	if id == "" || !s.tasks.first(key) {
		return
	}
	j.agent = e.AgentID
	s.client.newTask(s, j, key, &s.tasks).start(func(result any, err error) {
		s.respond(method, raw, j, result, err, true)
	})
}

// respond answers an event that asked. It returns when the writer has the answer: what the server makes of it is not waited for, except that
// an answer which it or the encoder refuses is replaced, once, by that of a failed handler, so that nothing stays pending.
func (s *Session) respond(method string, id json.RawMessage, j job, result any, err error, again bool) {
	c := s.client
	answer, err := j.reply(result, err)
	if err != nil {
		c.log.Warn("copilot: a handler's answer cannot be used", "method", method, "error", c.mask(clip(err.Error()), nil))
	}
	members, _ := answer.(map[string]any)
	if members == nil || s.released() {
		return
	}
	params := answerParams{session: s.id, request: id, members: members}
	cl := &call{method: method, request: outgoing{taken: make(chan struct{})}, then: func(raw json.RawMessage, err error) {
		var rpc *RPCError
		refused := errors.As(err, &rpc) && !errors.Is(err, ErrSessionNotFound) || errors.Is(err, ErrInvalidConfig)
		switch {
		case refused && again:
			c.conn.log.Warn("copilot: an answer was refused", "method", method)
			go s.respond(method, id, j, nil, errRefused, false) // owned by the client; ends when the writer has the answer, or with the connection
		case err != nil:
			c.conn.log.Debug("copilot: an answer did not arrive", "method", method)
		case string(member(raw, "success")) == "false":
			c.conn.log.Debug("copilot: an answer came too late", "method", method)
		}
	}}
	if c.conn.request(context.Background(), cl, params) == nil { // else then has seen the error
		_ = c.conn.written(&cl.request)
	}
}

// answerParams are the params of the call that answers an event. members have the names of neither id.
type answerParams struct {
	session string
	request json.RawMessage // as the server spelled it
	members map[string]any
}

func (p answerParams) writeJSON(buf *bytes.Buffer) error {
	buf.WriteString(`{"sessionId":`)
	buf.Write(appendQuoted(buf.AvailableBuffer(), p.session))
	buf.WriteString(`,"requestId":`)
	buf.Write(p.request)
	for name, v := range p.members {
		buf.WriteByte(',')
		buf.Write(appendQuoted(buf.AvailableBuffer(), name))
		buf.WriteByte(':')
		if err := encodeJSON(buf, v); err != nil {
			return err
		}
	}
	buf.WriteByte('}')
	return nil
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
	RequestID        string          // names the request: a host that is restarted can answer it by [Session.AnswerToolCall]
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

// The outcomes of a tool call. All but [ToolRejected] let the agent go on.
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
			call := ToolCall{SessionID: s.id, AgentID: agent}
			var trace [2]string
			eachMember(data, func(name, raw []byte) {
				switch string(name) {
				case "requestId":
					call.RequestID = unquote(raw)
				case "toolCallId":
					call.ID = unquote(raw)
				case "toolName":
					call.Name = unquote(raw)
				case "arguments":
					call.Arguments = raw
				case "workingDirectory":
					call.WorkingDirectory = unquote(raw)
				case "traceparent":
					trace[0] = unquote(raw)
				case "tracestate":
					trace[1] = unquote(raw)
				}
			})
			if call.ID == "" {
				return nil, errors.New("the request has no toolCallId")
			}
			if call.Arguments == nil || string(call.Arguments) == "null" {
				call.Arguments = json.RawMessage("{}")
			}
			if trace[0] != "" {
				ctx = context.WithValue(ctx, traceKey{}, trace)
			}
			return h(ctx, call)
		},
		reply: func(result any, err error) (any, error) {
			r, _ := result.(ToolResult)
			r, err = r.checked(err)
			if r.isText() {
				return map[string]any{"result": r.Text}, err
			}
			return map[string]any{"result": r}, err
		},
	}
}

// isText reports whether there is nothing but a text.
func (r *ToolResult) isText() bool {
	return r.Type == "" && r.Error == "" && r.SessionLog == "" &&
		len(r.Telemetry) == 0 && len(r.Binary) == 0 && len(r.Contents) == 0 && len(r.References) == 0
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
// other fields of the tool may be set afterwards; without SkipPermission, each call needs a permission first. An In that has no schema,
// or is no object, makes [Client.PrepareSession] fail with ErrInvalidConfig.
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
	PossibleURLs             []string            `json:"-"`                        // shell
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

// NoResult sends no answer: another client gives one, or this host later by [Session.AnswerPermission].
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
			var wire struct {
				PermissionRequest
				PossibleURLs []struct{ URL string } `json:"possibleUrls"`
			}
			if err := json.Unmarshal(raw, &wire); err != nil {
				wire.PermissionRequest, wire.PossibleURLs, kind = PermissionRequest{}, nil, ""
			}
			r := wire.PermissionRequest
			for _, u := range wire.PossibleURLs {
				r.PossibleURLs = append(r.PossibleURLs, u.URL)
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
			if err == nil {
				result, err = d.members(kind)
			}
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

func (s *Session) elicitationJob(e Event) job {
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

func (s *Session) mcpAuthJob(e Event) job {
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
// whose zero value changes nothing. An error or a panic counts as no output. PreToolUse differs: an error, a panic and the zero value deny the
// tool. They are called on goroutines of their own, several at a time; those for sub-agents come with the id of the sub-agent's session.
//
// Members of outputs that no comment explains are the runtime's affair, and go there under their JSON names.
type Hooks struct {
	// PreToolUse runs before each tool call: it may deny or allow it, have the user asked, and change the arguments. One that only looks on returns
	// HookPass.
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

// The decisions of a PreToolUse hook. "" is HookPass in an output that has something else to say, and HookDeny in one that has not.
const (
	HookAllow HookDecision = "allow" // without asking for permission
	HookDeny  HookDecision = "deny"
	HookAsk   HookDecision = "ask"  // a permission of kind "hook"
	HookPass  HookDecision = "pass" // the usual permission decides
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

// HookCall is a hook that [Hooks] has no function for. A nil output says nothing, also of a preToolUse.
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

// decided makes an output without any content a denial, and one that passes has no decision for the server.
func decided(f func(ctx context.Context, in PreToolUseInput) (PreToolUseOutput, error)) func(ctx context.Context, in PreToolUseInput) (PreToolUseOutput, error) {
	if f == nil {
		return nil
	}
	return func(ctx context.Context, in PreToolUseInput) (PreToolUseOutput, error) {
		out, err := f(ctx, in)
		if err == nil && reflect.ValueOf(out).IsZero() {
			err = fmt.Errorf("%w: zero decision", errBadHandler)
		}
		if out.Decision == HookPass {
			out.Decision = ""
		}
		return out, err
	}
}

// of returns the function for a type of hook, nil where there is none.
func (h *Hooks) of(hookType string) hookFunc {
	switch hookType {
	case "preToolUse":
		return typed(decided(h.PreToolUse))
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

// Tool is a function of the host that the model can call.
type Tool struct {
	// Name is made of A-Z, a-z, 0-9, "_" and "-", and unique among the tools of a session.
	Name string `json:"name,required"`
	// Description tells the model what the tool does.
	Description string `json:"description,omitempty"`
	// Instructions go into the system prompt when the tool is loaded.
	Instructions string `json:"instructions,omitempty"`
	// Parameters is the JSON Schema of the arguments: a [json.RawMessage], a map or a struct that encodes as an object. Nil is
	// an object without members. See [SchemaFor].
	Parameters any `json:"parameters"`
	// OverridesBuiltIn replaces the built-in tool of that name; without it the built-in one may win.
	OverridesBuiltIn bool `json:"overridesBuiltInTool,omitempty"`
	// SkipPermission runs the tool without asking for permission; else each call is a [PermissionCustomTool] for SessionConfig.OnPermission.
	SkipPermission bool `json:"skipPermission,omitempty"`
	// Defer is "auto" or "never": whether the tool may be left out until the model searches for it.
	Defer string `json:"defer,omitempty"`
	// Terminal ends the agent's run when the tool has succeeded.
	Terminal bool `json:"isTerminal,omitempty"`
	// Metadata is handed through.
	Metadata map[string]any `json:"metadata,omitempty"`
	// NamespacedName is the name with its namespace, for tool filters.
	NamespacedName string `json:"namespacedName,omitempty"`
	// Handler runs the tool. Nil only declares it: somebody else answers its calls.
	Handler ToolHandler `json:"-"`
}

// Command is a slash command of the host.
type Command struct {
	// Name has no slash and no blank, and is unique among the commands of a session.
	Name string `json:"name,required"`
	// Description is shown to people.
	Description string `json:"description"`
	// Handler runs the command; required.
	Handler func(ctx context.Context, c CommandCall) error `json:"-"`
}

// hosted is what a session's host keeps for the server.
type hosted struct {
	files        SessionFS
	canvases     map[string]CanvasDeclaration
	tokens       map[string]func(ctx context.Context, provider string) (string, error) // by provider
	registration string                                                                // of gitHubToken
	gitHubToken  func(ctx context.Context, r GitHubTokenRequest) (*GitHubAccessToken, error)
}

// host is what a client keeps for the server besides its sessions' own.
type host struct {
	exchanges     exchanges
	telemetry     telemetry
	registrations map[string]*Session // GitHub token providers by the server's name; guarded by Client.mu
}

func newHost() *host {
	h := &host{registrations: make(map[string]*Session)}
	h.telemetry.work.max = 1
	return h
}

// registerLocked makes s known as a provider of GitHub tokens, which is asked before its start is answered. c.mu is held.
func (c *Client) registerLocked(s *Session) {
	if s.hosted.gitHubToken != nil {
		c.host.registrations[s.hosted.registration] = s
	}
}

// unregisterLocked undoes registerLocked.
func (c *Client) unregisterLocked(s *Session) {
	if id := s.hosted.registration; c.host.registrations[id] == s {
		delete(c.host.registrations, id)
	}
}

// setUpHosting tells the server what this client keeps for it.
func (c *Client) setUpHosting(ctx context.Context) error {
	tell := func(method string, params any) error {
		raw, err := c.call(ctx, method, params, nil)
		if err == nil && string(member(raw, "success")) == "false" {
			err = errors.New(method + ": the server declined")
		}
		return err
	}
	if f := c.opts.SessionFS; f != nil {
		type capabilities struct {
			SQLite bool `json:"sqlite"`
		}
		params := struct {
			InitialCWD   string        `json:"initialCwd"`
			StatePath    string        `json:"sessionStatePath"`
			Conventions  string        `json:"conventions"`
			Capabilities *capabilities `json:"capabilities,omitempty"`
		}{f.InitialCWD, f.StatePath, f.Conventions, nil}
		if f.SQLite {
			params.Capabilities = &capabilities{true}
		}
		if err := tell("sessionFs.setProvider", params); err != nil {
			return err
		}
	}
	if c.opts.ModelTransport != nil {
		return tell("llmInference.setProvider", nil)
	}
	return nil
}

// hostRequest is directRequest for what the host keeps.
func (c *Client) hostRequest(method string) func(s *Session, params json.RawMessage) job {
	var serve func(ctx context.Context, s *Session, params json.RawMessage) (any, error)
	j := job{host: true}
	switch method {
	case "gitHubToken.getToken":
		serve = c.serveGitHubToken
	case "providerToken.getToken":
		serve = serveProviderToken
	case "canvas.open", "canvas.close", "canvas.action.invoke":
		j.reply = canvasReply
		serve = func(ctx context.Context, s *Session, params json.RawMessage) (any, error) {
			return serveCanvas(ctx, s, method, params)
		}
	case "sessionFs.readFile", "sessionFs.writeFile", "sessionFs.appendFile", "sessionFs.exists", "sessionFs.stat", "sessionFs.mkdir",
		"sessionFs.readdir", "sessionFs.readdirWithTypes", "sessionFs.rm", "sessionFs.rename",
		"sessionFs.sqliteQuery", "sessionFs.sqliteTransaction", "sessionFs.sqliteExists":
		j.scope = serviceScope // a release must not cancel the writes that it causes
		serve = func(ctx context.Context, s *Session, params json.RawMessage) (any, error) {
			return serveFile(ctx, s, method, params)
		}
	default:
		return nil
	}
	return func(s *Session, params json.RawMessage) job {
		j := j
		j.run = func(ctx context.Context) (any, error) { return serve(ctx, s, params) }
		return j
	}
}

// ---- session files ----

// SessionFSConfig declares, in [Options], that this client keeps the files of its sessions: the conversation, checkpoints, plans.
// Every session then needs a [SessionFS].
type SessionFSConfig struct {
	// InitialCWD is the sessions' working directory, as a path of the SessionFS; required.
	InitialCWD string
	// StatePath is where the server keeps a session's state; required. Paths elsewhere are used too.
	StatePath string
	// Conventions is "posix" or "windows": how the server writes paths. "" means this system's.
	Conventions string
	// SQLite declares that every SessionFS is a [SessionSQLite] as well.
	SQLite bool
	// New returns the files of a session whose [SessionConfig] has none. It is called while the session is being prepared; the id is "" where
	// the server will choose it. Nil from it is ErrInvalidConfig.
	New func(sessionID string) SessionFS
}

// checked fills in the defaults of f, which may be nil.
func (f *SessionFSConfig) checked() error {
	if f == nil {
		return nil
	}
	if f.Conventions == "" {
		f.Conventions = "posix"
		if runtime.GOOS == "windows" {
			f.Conventions = "windows"
		}
	}
	switch {
	case f.InitialCWD == "":
		return fmt.Errorf("%w: SessionFS.InitialCWD is missing", ErrInvalidConfig)
	case f.StatePath == "":
		return fmt.Errorf("%w: SessionFS.StatePath is missing", ErrInvalidConfig)
	case f.Conventions != "posix" && f.Conventions != "windows":
		return fmt.Errorf(`%w: SessionFS.Conventions %.64q is neither "posix" nor "windows"`, ErrInvalidConfig, f.Conventions)
	}
	return nil
}

// SessionFS holds the files of a session. Names are the server's paths, in the conventions that [SessionFSConfig] declares. Contents are text:
// bytes that are no UTF-8 reach the server as U+FFFD.
//
// Errors are results for the server, which tells only those that match [fs.ErrNotExist] from others, and reads their text. Methods are
// called from several goroutines at once, before the start of the session has returned already. ctx ends with the session.
//
// [DirFS] is one over a directory.
type SessionFS interface {
	ReadFile(ctx context.Context, name string) ([]byte, error)
	// WriteFile replaces the file or creates it; perm is what the server asks for, 0666 where it does not say.
	WriteFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error
	// AppendFile is WriteFile at the end of the file. It creates missing directories.
	AppendFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error
	// Stat also answers whether a file exists.
	Stat(ctx context.Context, name string) (fs.FileInfo, error)
	ReadDir(ctx context.Context, name string) ([]fs.DirEntry, error)
	Mkdir(ctx context.Context, name string, perm fs.FileMode) error
	// MkdirAll also makes missing parents; a directory that exists is no error.
	MkdirAll(ctx context.Context, name string, perm fs.FileMode) error
	// Remove removes a file or an empty directory.
	Remove(ctx context.Context, name string) error
	// RemoveAll also removes what is below; nothing to remove is no error.
	RemoveAll(ctx context.Context, name string) error
	// Rename replaces a file of the new name, at best atomically: the server relies on it.
	Rename(ctx context.Context, oldName, newName string) error
}

// SessionSQLite is the part of a [SessionFS] that keeps a SQLite database for the session.
type SessionSQLite interface {
	Query(ctx context.Context, s SQLStatement) (SQLResult, error)
	// Transaction runs all statements or none, and returns a result for each. A [*SQLTransactionError] tells the server what it may do.
	Transaction(ctx context.Context, statements []SQLStatement) ([]SQLResult, error)
	// DatabaseExists reports whether there is a database yet; asking does not make one.
	DatabaseExists(ctx context.Context) (bool, error)
}

// SQLStatement is one statement of the server's.
type SQLStatement struct {
	Query string `json:"query"`
	// Type is "exec" for statements without a result, "query" for rows, "run" for a write that counts rows.
	Type string `json:"queryType"`
	// Params are the named parameters: string, bool, int64, float64, nil, or what else JSON has.
	Params map[string]any `json:"params"`
}

// SQLResult is the outcome of a statement. Values must encode as JSON.
type SQLResult struct {
	Rows            []map[string]any `json:"rows"`
	Columns         []string         `json:"columns"`
	RowsAffected    int64            `json:"rowsAffected"`
	LastInsertRowID *int64           `json:"lastInsertRowid,omitempty"`
}

// SQLTransactionError says how a transaction failed.
type SQLTransactionError struct {
	// Class is "busyOrLocked" (may be tried again), "fatal", or "postCommitAmbiguous" (nobody knows whether it took effect).
	Class string
	Err   error
}

// Error describes what went wrong.
func (e *SQLTransactionError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *SQLTransactionError) Unwrap() error { return e.Err }

// fileError is a failure of the host's files on the wire.
type fileError struct {
	Code    string `json:"code"`
	Message string `json:"message,omitempty"`
}

func newFileError(err error) *fileError {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return &fileError{"ENOENT", err.Error()}
	}
	return &fileError{"UNKNOWN", err.Error()}
}

// maxSessionFile is the largest file that is read for the server, which takes it as one string.
const maxSessionFile = defaultMaxFrame

// serveFile answers sessionFs.*: what fails in the host's files is a result.
func serveFile(ctx context.Context, s *Session, method string, params json.RawMessage) (any, error) {
	var p struct {
		Path, Src, Dest  string
		Content          string
		Mode             *uint32
		Recursive, Force bool
	}
	if bad := decodeParams(params, &p); bad != nil {
		return nil, bad
	}
	files := s.hosted.files
	if files == nil {
		return nil, errors.New("this session has no SessionFS")
	}
	perm := func(unset fs.FileMode) fs.FileMode {
		if p.Mode == nil {
			return unset
		}
		return fs.FileMode(*p.Mode) & fs.ModePerm
	}
	name := strings.TrimPrefix(method, "sessionFs.")
	switch {
	case strings.HasPrefix(name, "sqlite"):
		return serveSQLite(ctx, files, name, params)
	case name == "rename" && (p.Src == "" || p.Dest == ""):
		return nil, &RPCError{Code: codeInvalidParams, Message: "params: src or dest is missing"}
	case name != "rename" && p.Path == "":
		return nil, &RPCError{Code: codeInvalidParams, Message: "params: path is missing"}
	}
	var err error
	switch name {
	case "readFile":
		data, err := files.ReadFile(ctx, p.Path)
		if err == nil && len(data) > maxSessionFile {
			err = &fs.PathError{Op: "read", Path: p.Path, Err: errTooLarge}
		}
		result := struct {
			Content string     `json:"content"`
			Error   *fileError `json:"error,omitempty"`
		}{Error: newFileError(err)}
		if err == nil {
			result.Content = string(data)
		}
		return result, nil
	case "exists":
		_, err := files.Stat(ctx, p.Path)
		return map[string]bool{"exists": err == nil}, nil
	case "stat":
		info, err := files.Stat(ctx, p.Path)
		result := struct {
			IsFile      bool       `json:"isFile"`
			IsDirectory bool       `json:"isDirectory"`
			Size        int64      `json:"size"`
			ModTime     time.Time  `json:"mtime"`
			BirthTime   time.Time  `json:"birthtime"`
			Error       *fileError `json:"error,omitempty"`
		}{Error: newFileError(err), ModTime: time.Unix(0, 0).UTC(), BirthTime: time.Unix(0, 0).UTC()}
		if err == nil {
			result.IsFile, result.IsDirectory, result.Size = info.Mode().IsRegular(), info.IsDir(), info.Size()
			result.ModTime, result.BirthTime = info.ModTime().UTC(), info.ModTime().UTC() // package fs knows no birth
		}
		return result, nil
	case "readdir", "readdirWithTypes":
		return serveReadDir(ctx, files, p.Path, name == "readdirWithTypes"), nil
	case "writeFile":
		err = files.WriteFile(ctx, p.Path, []byte(p.Content), perm(0o666))
	case "appendFile":
		err = files.AppendFile(ctx, p.Path, []byte(p.Content), perm(0o666))
	case "mkdir":
		mkdir := files.Mkdir
		if p.Recursive {
			mkdir = files.MkdirAll
		}
		err = mkdir(ctx, p.Path, perm(0o777))
	case "rm":
		remove := files.Remove
		if p.Recursive {
			if remove = files.RemoveAll; !p.Force {
				_, err = files.Stat(ctx, p.Path) // RemoveAll would not say
			}
		}
		if err == nil {
			err = remove(ctx, p.Path)
		}
		if p.Force && errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	case "rename":
		err = files.Rename(ctx, p.Src, p.Dest)
	}
	return newFileError(err), nil
}

func serveReadDir(ctx context.Context, files SessionFS, name string, types bool) any {
	type entry struct {
		Name string `json:"name"`
		Type string `json:"type"`
	}
	list, err := files.ReadDir(ctx, name)
	entries := []any{}
	for _, e := range list {
		switch {
		case err != nil:
		case !types:
			entries = append(entries, e.Name())
		case e.IsDir():
			entries = append(entries, entry{e.Name(), "directory"})
		default:
			entries = append(entries, entry{e.Name(), "file"})
		}
	}
	return struct {
		Entries []any      `json:"entries"`
		Error   *fileError `json:"error,omitempty"`
	}{entries, newFileError(err)}
}

func serveSQLite(ctx context.Context, files SessionFS, name string, params json.RawMessage) (any, error) {
	db, ok := files.(SessionSQLite)
	if !ok {
		return nil, errors.New("this session has no SQLite")
	}
	var p struct {
		SQLStatement
		Statements []SQLStatement
	}
	if bad := decodeParams(params, &p); bad != nil {
		return nil, bad
	}
	switch name {
	case "sqliteExists":
		exists, err := db.DatabaseExists(ctx)
		return map[string]bool{"exists": exists && err == nil}, nil
	case "sqliteQuery":
		p.wholeNumbers()
		r, err := db.Query(ctx, p.SQLStatement)
		if err != nil {
			r = SQLResult{}
		}
		r.notNil()
		return struct {
			SQLResult
			Error *fileError `json:"error,omitempty"`
		}{r, newFileError(err)}, nil
	}
	type transactionError struct {
		Class   string `json:"errorClass"`
		Message string `json:"message"`
	}
	var result struct {
		Results []SQLResult       `json:"results"`
		Error   *transactionError `json:"error,omitempty"`
	}
	for i := range p.Statements {
		p.Statements[i].wholeNumbers()
	}
	results, err := db.Transaction(ctx, p.Statements)
	if err != nil {
		result.Results, result.Error = []SQLResult{}, &transactionError{"fatal", err.Error()}
		if t := (*SQLTransactionError)(nil); errors.As(err, &t) {
			result.Error.Class = t.Class
		}
		return result, nil
	}
	result.Results = append([]SQLResult{}, results...)
	for i := range result.Results {
		result.Results[i].notNil()
	}
	return result, nil
}

// wholeNumbers makes int64 of the parameters that are whole numbers, which a database keeps apart from others.
func (s *SQLStatement) wholeNumbers() {
	for k, v := range s.Params {
		if f, ok := v.(float64); ok && f == float64(int64(f)) {
			s.Params[k] = int64(f)
		}
	}
}

// notNil makes empty lists of nil ones, which would be null on the wire.
func (r *SQLResult) notNil() {
	if r.Rows == nil {
		r.Rows = []map[string]any{}
	}
	if r.Columns == nil {
		r.Columns = []string{}
	}
}

var (
	errTooLarge = fmt.Errorf("larger than %d bytes", maxSessionFile)
	errOutside  = fmt.Errorf("leads out of the directory: %w", fs.ErrPermission)
	errLink     = fmt.Errorf("is a link: %w", fs.ErrPermission)
	errSpecial  = fmt.Errorf("is no regular file: %w", fs.ErrPermission)

	errNoDirectory = errors.New("is no directory")
)

// DirFS returns the files below a directory of this machine as a [SessionFS]: the path /a/b is dir/a/b, C:\a is dir/C/a. The directory is made when
// the first file is. Files may be 256 MiB large.
//
// No path leaves dir: ".." above it is refused, and so is every link below it, wherever it leads, except to remove or rename the link
// itself. One thing is not covered: somebody who may write below dir and puts a link in the place of a directory at the very
// moment of a call can win. Hard links are files like others.
func DirFS(dir string) SessionFS { return dirFS(filepath.Clean(dir)) }

type dirFS string

// locate returns the place of one of the server's paths, once no link stands on the way to it. make, when not zero, makes missing
// directories on that way.
func (d dirFS) locate(ctx context.Context, name string, make fs.FileMode) (path string, err error) {
	if ctx.Err() != nil {
		return "", contextError(ctx)
	}
	elements, err := splitPath(name)
	if err != nil {
		return "", err
	}
	path = string(d)
	if make != 0 {
		if err := os.MkdirAll(path, make); err != nil {
			return "", err
		}
	}
	for i, e := range elements {
		if path = filepath.Join(path, e); i == len(elements)-1 {
			break
		}
		if err := directory(path, make); err != nil {
			return "", err
		}
	}
	return path, nil
}

// locateEntry is locate for what may not be the directory itself.
func (d dirFS) locateEntry(ctx context.Context, name string) (string, error) {
	path, err := d.locate(ctx, name, 0)
	if err == nil && path == string(d) {
		err = fs.ErrPermission
	}
	return path, err
}

// splitPath takes a path of the server's apart. Links being refused, ".." can be taken literally.
func splitPath(name string) (elements []string, err error) {
	slashed := name
	drive := len(name) > 2 && name[1] == ':' && (name[2] == '\\' || name[2] == '/')
	if drive {
		slashed = name[:1] + name[2:]
	}
	if drive || runtime.GOOS == "windows" {
		slashed = strings.ReplaceAll(slashed, `\`, "/")
	}
	for _, e := range strings.Split(slashed, "/") {
		switch {
		case e == "" || e == ".":
		case e != "..":
			elements = append(elements, e)
		case len(elements) == 0:
			return nil, errOutside
		default:
			elements = elements[:len(elements)-1]
		}
	}
	local := filepath.Join(elements...)
	if name == "" || strings.Contains(name, "\x00") || local != "" && !filepath.IsLocal(local) { // names that the system reserves, too
		return nil, fs.ErrInvalid
	}
	return elements, nil
}

// directory returns nil if path is a directory and no link; it makes it when make is not zero.
func directory(path string, make fs.FileMode) error {
	info, err := os.Lstat(path)
	if make != 0 && errors.Is(err, fs.ErrNotExist) {
		if err := os.Mkdir(path, make); err != nil && !errors.Is(err, fs.ErrExist) { // another call may have been faster
			return err
		}
		info, err = os.Lstat(path)
	}
	switch {
	case err != nil:
		return err
	case info.Mode()&fs.ModeSymlink != 0:
		return errLink
	case !info.IsDir():
		return errNoDirectory
	}
	return nil
}

// openRegular opens a regular file and nothing else. What is there is looked at before, so that no device is touched, and after, so that
// what was opened is no other.
func openRegular(path string, flag int, perm fs.FileMode) (*os.File, error) {
	before, err := os.Lstat(path)
	switch {
	case err == nil && before.Mode()&fs.ModeSymlink != 0:
		return nil, errLink
	case err == nil && !before.Mode().IsRegular():
		return nil, errSpecial
	case err != nil && flag&os.O_CREATE == 0:
		return nil, err
	}
	f, err := os.OpenFile(path, flag|openNoFollow, perm)
	if err != nil {
		return nil, err
	}
	after, err := f.Stat()
	if err == nil && !after.Mode().IsRegular() {
		err = errSpecial
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// pathError says what was done to which of the server's paths. Our own path is no concern of the server's.
func pathError(op, name string, err error) error {
	if err == nil {
		return nil
	}
	var inner *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &inner):
		err = inner.Err
	case errors.As(err, &link):
		err = link.Err
	}
	return &fs.PathError{Op: op, Path: name, Err: err}
}

func (d dirFS) ReadFile(ctx context.Context, name string) ([]byte, error) {
	path, err := d.locate(ctx, name, 0)
	if err != nil {
		return nil, pathError("read", name, err)
	}
	f, err := openRegular(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, pathError("read", name, err)
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > maxSessionFile {
		return nil, pathError("read", name, errTooLarge)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxSessionFile+1))
	return data, pathError("read", name, err)
}

func (d dirFS) WriteFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error {
	return pathError("write", name, d.write(ctx, name, os.O_TRUNC, data, perm))
}

func (d dirFS) AppendFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error {
	return pathError("append", name, d.write(ctx, name, os.O_APPEND, data, perm))
}

func (d dirFS) write(ctx context.Context, name string, flag int, data []byte, perm fs.FileMode) error {
	path, err := d.locate(ctx, name, 0o777)
	if err != nil {
		return err
	}
	f, err := openRegular(path, os.O_WRONLY|os.O_CREATE|flag, perm)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if closing := f.Close(); err == nil {
		err = closing
	}
	return err
}

func (d dirFS) Stat(ctx context.Context, name string) (info fs.FileInfo, err error) {
	path, err := d.locate(ctx, name, 0)
	if err == nil && path == string(d) {
		info, err = os.Stat(path)
	} else if err == nil {
		if info, err = os.Lstat(path); err == nil && info.Mode()&fs.ModeSymlink != 0 {
			err = errLink
		}
	}
	return info, pathError("stat", name, err)
}

func (d dirFS) ReadDir(ctx context.Context, name string) (entries []fs.DirEntry, err error) {
	path, err := d.locate(ctx, name, 0)
	if err == nil && path != string(d) {
		err = directory(path, 0)
	}
	if err == nil {
		entries, err = os.ReadDir(path)
	}
	return entries, pathError("readdir", name, err)
}

func (d dirFS) Mkdir(ctx context.Context, name string, perm fs.FileMode) error {
	path, err := d.locate(ctx, name, 0)
	if err == nil {
		err = os.Mkdir(path, perm)
	}
	return pathError("mkdir", name, err)
}

func (d dirFS) MkdirAll(ctx context.Context, name string, perm fs.FileMode) error {
	perm |= 0o700 // else what is below could not be made
	path, err := d.locate(ctx, name, perm)
	if err == nil && path != string(d) {
		err = directory(path, perm)
	}
	return pathError("mkdir", name, err)
}

func (d dirFS) Remove(ctx context.Context, name string) error {
	path, err := d.locateEntry(ctx, name)
	if err == nil {
		err = os.Remove(path)
	}
	return pathError("remove", name, err)
}

func (d dirFS) RemoveAll(ctx context.Context, name string) error {
	path, err := d.locateEntry(ctx, name)
	switch {
	case err == nil:
		err = os.RemoveAll(path)
	case errors.Is(err, fs.ErrNotExist):
		err = nil
	}
	return pathError("remove", name, err)
}

func (d dirFS) Rename(ctx context.Context, oldName, newName string) error {
	from, err := d.locateEntry(ctx, oldName)
	if err != nil {
		return pathError("rename", oldName, err)
	}
	to, err := d.locateEntry(ctx, newName)
	if err == nil {
		err = os.Rename(from, to)
	}
	return pathError("rename", oldName+" to "+newName, err)
}

// ---- tokens ----

// serveProviderToken answers providerToken.getToken. The function's own error goes to the server, without what is known to be secret.
func serveProviderToken(ctx context.Context, s *Session, params json.RawMessage) (any, error) {
	var p struct{ ProviderName string }
	if bad := decodeParams(params, &p); bad != nil {
		return nil, bad
	}
	get := s.hosted.tokens[p.ProviderName]
	if get == nil {
		return nil, fmt.Errorf("no token provider for %s", quote(p.ProviderName))
	}
	token, err := get(ctx, p.ProviderName)
	if err == nil {
		err = checkToken(token)
	}
	if err != nil {
		return nil, errors.New("token provider: " + mask(err.Error(), append([]string{token}, *s.secrets...)))
	}
	return map[string]string{"token": token}, nil
}

// checkToken refuses what no header can carry. Its error does not show the token.
func checkToken(token string) error {
	if token == "" || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return errors.New("it returned no token, or one with blanks or control characters")
	}
	return nil
}

// GitHubTokenRequest asks for a GitHub token, see [SessionConfig.GitHubTokenProvider].
type GitHubTokenRequest struct {
	Host      string // such as "github.com"
	SessionID string
	Reason    string // "initial", or "refresh" when the earlier token lasts an hour or less
}

// GitHubAccessToken is what a [SessionConfig.GitHubTokenProvider] returns. Printing it shows no token.
type GitHubAccessToken struct {
	AccessToken string `json:"accessToken,required,secret"`
	TokenType   string `json:"tokenType,omitempty"` // "" means bearer
	// ExpiresIn is how long the token lasts, in whole seconds; it must be positive. The server asks again in the last hour.
	ExpiresIn time.Duration `json:"expiresIn,required"`
}

// Format prints t without its secrets, for every verb.
func (t GitHubAccessToken) Format(f fmt.State, verb rune) { formatMasked(f, t) }

// MarshalJSON returns t without its secrets.
func (t GitHubAccessToken) MarshalJSON() ([]byte, error) { return maskedJSON(t) }

// serveGitHubToken answers gitHubToken.getToken, which names a registration, and a session at best.
func (c *Client) serveGitHubToken(ctx context.Context, _ *Session, params json.RawMessage) (any, error) {
	var p struct {
		GitHubTokenRequest
		RegistrationID string
	}
	if bad := decodeParams(params, &p); bad != nil {
		return nil, bad
	}
	c.mu.Lock()
	s := c.host.registrations[p.RegistrationID]
	c.mu.Unlock()
	if s == nil {
		return nil, &RPCError{Code: codeMethodNotFound, Message: "no GitHub token provider has this registration"}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(s.failure()) })()
	token, err := s.hosted.gitHubToken(ctx, p.GitHubTokenRequest)
	switch {
	case err != nil:
		if token == nil {
			token = &GitHubAccessToken{}
		}
		return nil, errors.New("GitHub token provider: " + mask(err.Error(), []string{token.AccessToken}))
	case token == nil:
		return map[string]string{"kind": "cancelled"}, nil
	case token.ExpiresIn < time.Second:
		return nil, errors.New("GitHub token provider: ExpiresIn is less than a second")
	}
	if err := checkToken(token.AccessToken); err != nil {
		return nil, errors.New("GitHub token provider: " + err.Error())
	}
	return struct {
		Kind        string `json:"kind"`
		AccessToken string `json:"accessToken"`
		TokenType   string `json:"tokenType,omitempty"`
		ExpiresIn   int64  `json:"expiresIn"`
	}{"token", token.AccessToken, token.TokenType, int64(token.ExpiresIn / time.Second)}, nil
}

// ---- canvases ----

// CanvasCall is what the server wants of a canvas of the host's.
type CanvasCall struct {
	SessionID   string
	ExtensionID string
	CanvasID    string
	InstanceID  string
	ActionName  string          // of an action only
	Input       json.RawMessage // as received, nil when there is none
	// WorkingDirectory is the session's, "" when the server does not say.
	WorkingDirectory string
	// CanvasesShown tells whether the place that the call comes from can show canvases; nil when it does not say.
	CanvasesShown *bool
}

// CanvasView is how an opened canvas is shown.
type CanvasView struct {
	URL    string `json:"url,omitempty"`
	Title  string `json:"title,omitempty"`
	Status string `json:"status,omitempty"`
}

// CanvasError is an error of a canvas with a code for the server. Other errors have the code "canvas_handler_error".
type CanvasError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// Error describes what went wrong.
func (e *CanvasError) Error() string { return "canvas: " + e.Message + " (" + e.Code + ")" }

// serveCanvas answers canvas.*.
func serveCanvas(ctx context.Context, s *Session, method string, params json.RawMessage) (any, error) {
	var p struct {
		CanvasCall
		Host    struct{ Capabilities struct{ Canvases *bool } }
		Session struct{ WorkingDirectory string }
	}
	if bad := decodeParams(params, &p); bad != nil {
		return nil, bad
	}
	call := p.CanvasCall
	call.WorkingDirectory, call.CanvasesShown = p.Session.WorkingDirectory, p.Host.Capabilities.Canvases
	canvas, declared := s.hosted.canvases[call.CanvasID]
	switch {
	case !declared || canvas.Open == nil:
		return nil, &CanvasError{"canvas_handler_unset", "no handler for canvas " + quote(call.CanvasID)}
	case method == "canvas.open":
		return canvas.Open(ctx, call)
	case method == "canvas.close" && canvas.Close == nil:
		return nil, nil
	case method == "canvas.close":
		return nil, canvas.Close(ctx, call)
	}
	for _, a := range canvas.Actions {
		if a.Name == call.ActionName && a.Handler != nil {
			return a.Handler(ctx, call)
		}
	}
	return nil, &CanvasError{"canvas_action_no_handler", "no handler for action " + quote(call.ActionName)}
}

// canvasReply puts an error into the form that canvases have of their own.
func canvasReply(result any, err error) (any, error) {
	var rpc *RPCError
	var params *paramsError
	if err == nil || errors.As(err, &rpc) || errors.As(err, &params) {
		return result, err
	}
	told := &CanvasError{"canvas_handler_error", err.Error()}
	errors.As(err, &told)
	data, _ := marshal(told) // two strings
	return nil, &RPCError{Code: codeInternal, Message: told.Message, Data: data}
}

// ---- model traffic ----

const (
	maxRequestBody = 64 << 20 // of a model request, waiting to be read: room for every request that models take
	responsePiece  = 32 << 10 // of a model's response, sent at once
)

var (
	errBodyOverflow     = errors.New("too much of the request body waited to be read")
	errModelCancelled   = fmt.Errorf("%w: the runtime cancelled the model request", errResolved)
	errModelUnwanted    = errors.New("the runtime wants no more of the response")
	errModelWebSockets  = errors.New("Options.ModelTransport serves no web sockets")
	errModelNotResponse = errors.New("Options.ModelTransport returned neither a response nor an error")
	errExchangeOver     = errors.New("the exchange is over")
)

// ModelRequest says on whose behalf the runtime asks its model. Fields are "" where it does not say.
type ModelRequest struct {
	SessionID         string
	AgentID           string
	ParentAgentID     string
	AgentInvocationID string
	InteractionType   string
}

type modelRequestKey struct{}

// ModelRequestFrom returns what the context of an [http.Request] that was given to [Options.ModelTransport] knows of it.
func ModelRequestFrom(ctx context.Context) (ModelRequest, bool) {
	r, ok := ctx.Value(modelRequestKey{}).(ModelRequest)
	return r, ok
}

// exchanges are the model requests in progress, by the runtime's id.
type exchanges struct {
	mu   sync.Mutex
	byID map[string]*exchange
}

func (e *exchanges) find(id string) *exchange {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.byID[id]
}

// add reports false when the id is in use.
func (e *exchanges) add(x *exchange) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.byID[x.id] != nil {
		return false
	}
	if e.byID == nil {
		e.byID = make(map[string]*exchange)
	}
	e.byID[x.id] = x
	return true
}

func (e *exchanges) remove(x *exchange) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.byID, x.id)
}

// exchange is one model request and its response. The reader feeds the body; everything else happens on the exchange's own goroutine.
type exchange struct {
	client  *Client
	task    *task
	id      string
	rawID   json.RawMessage // as the server spelled it
	method  string
	url     string
	header  http.Header
	socket  bool
	body    requestBody
	started bool // the response has begun
}

// serveModel takes a part of a model request, on the reader, and acknowledges it: the work is done elsewhere.
func (c *Client) serveModel(s *Session, method string, m *message) {
	refuse := func(bad error) { c.conn.replyNow(m.id, nil, refusal(bad)) }
	if c.opts.ModelTransport == nil {
		refuse(&RPCError{Code: codeInternal, Message: "this client has no model transport"})
		return
	}
	if method == "llmInference.httpRequestChunk" {
		if bad := c.modelChunk(m.params); bad != nil {
			refuse(bad)
			return
		}
		c.conn.replyNow(m.id, struct{}{}, nil)
		return
	}
	var p struct {
		ModelRequest
		Method, URL, Transport string
		Headers                http.Header
	}
	if bad := decodeParams(m.params, &p); bad != nil {
		refuse(bad)
		return
	}
	raw := member(m.params, "requestId")
	x := &exchange{client: c, id: exactText(raw), rawID: raw, method: p.Method, url: p.URL, header: endToEnd(p.Headers), socket: p.Transport == "websocket"}
	x.body.max, x.body.wake = maxRequestBody, make(chan struct{}, 1)
	var sets []*tasks
	if s != nil {
		sets = append(sets, &s.tasks)
	}
	run := func(ctx context.Context) (any, error) {
		defer context.AfterFunc(ctx, func() { x.body.fail(context.Cause(ctx)) })() // wakes a transport that reads the body
		switch err := x.roundTrip(context.WithValue(ctx, modelRequestKey{}, p.ModelRequest)); err {
		case nil, errModelUnwanted:
			return nil, nil
		default:
			return nil, errors.New(x.mask(err.Error()))
		}
	}
	x.task = c.newTask(s, job{host: true, run: run}, "model "+x.id, sets...)
	if x.id == "" || !c.host.exchanges.add(x) {
		x.task.cancel(nil)
		refuse(&paramsError{errors.New("requestId is missing or in use")})
		return
	}
	c.conn.replyNow(m.id, struct{}{}, nil)
	x.task.start(func(_ any, err error) {
		x.finish(x.task.ctx, err)
		x.body.Close()
		c.host.exchanges.remove(x)
	})
}

// modelChunk gives a piece of a request's body to its exchange. Pieces for exchanges that are over are ignored.
func (c *Client) modelChunk(params json.RawMessage) error {
	id, data := exactText(member(params, "requestId")), member(params, "data") // which is decoded by whoever reads the body
	is := func(name string) bool { return string(member(params, name)) == "true" }
	if id == "" {
		return &paramsError{errors.New("requestId is missing")}
	}
	switch x := c.host.exchanges.find(id); {
	case x == nil:
		c.conn.log.Debug("copilot: ignored a piece of a model request that is over")
	case is("cancel"):
		x.task.cancel(errModelCancelled)
	case len(data) > 0 && data[0] != '"':
		bad := &paramsError{errors.New("data is no string")}
		x.task.cancel(bad)
		return bad
	case !x.body.push(data, is("binary"), is("end")):
		x.task.cancel(errBodyOverflow)
	}
	return nil
}

func (x *exchange) roundTrip(ctx context.Context) error {
	if x.socket {
		return errModelWebSockets
	}
	req, err := http.NewRequestWithContext(ctx, x.method, x.url, &x.body)
	if err != nil {
		return fmt.Errorf("not an HTTP request: %.64q %s", x.method, quote(x.url))
	}
	req.Header = x.header
	if req.ContentLength = x.body.length(); req.ContentLength == 0 {
		req.Body = http.NoBody
	}
	resp, err := x.client.opts.ModelTransport.RoundTrip(req)
	if err != nil {
		return err
	}
	if resp == nil {
		return errModelNotResponse
	}
	if resp.Body == nil {
		resp.Body = http.NoBody
	}
	defer resp.Body.Close()
	if err := checkResponse(resp); err != nil {
		return err
	}
	if err := x.respond(ctx, resp.StatusCode, endToEnd(resp.Header)); err != nil {
		return err
	}
	for r := bufio.NewReaderSize(resp.Body, responsePiece); ; {
		_, err := r.Peek(1) // waits for what comes first, and only for that
		piece, _ := r.Peek(r.Buffered())
		if len(piece) > 0 {
			err = x.send(ctx, responseChunk{Data: piece})
			r.Discard(len(piece))
		}
		switch {
		case err == io.EOF:
			return x.send(ctx, responseChunk{Data: []byte{}, End: true})
		case err != nil:
			return err
		}
	}
}

// finish tells the runtime of an exchange that did not end well. It has a second for that, since ctx may have ended.
func (x *exchange) finish(ctx context.Context, err error) {
	if err == nil {
		return
	}
	status, failure := http.StatusBadGateway, &exchangeError{}
	if ctx.Err() != nil {
		const clientClosedRequest = 499
		status, failure.Code, err = clientClosedRequest, "cancelled", context.Cause(ctx)
	}
	failure.Message = err.Error()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settle)
	defer cancel()
	err = nil
	if !x.started {
		err = x.respond(ctx, status, nil)
	}
	if err == nil {
		err = x.send(ctx, responseChunk{Data: []byte{}, End: true, Error: failure})
	}
	if err != nil {
		x.client.log.Debug("copilot: the failure of a model request was not told", "error", err)
	}
}

// mask hides what the request's headers are likely to keep secret, and the client's own secrets.
func (x *exchange) mask(text string) string {
	var hide []string
	for name, values := range x.header {
		name = strings.ToLower(name)
		if strings.Contains(name, "auth") || strings.Contains(name, "key") || strings.Contains(name, "token") {
			for _, v := range values {
				hide = append(hide, v, v[strings.LastIndexByte(v, ' ')+1:]) // also without its scheme
			}
		}
	}
	return x.client.mask(mask(text, hide), nil)
}

// responseChunk is a piece of a response on the wire.
type responseChunk struct {
	RequestID json.RawMessage `json:"requestId"`
	Data      []byte          `json:"data"` // base64
	Binary    bool            `json:"binary"`
	End       bool            `json:"end,omitempty"`
	Error     *exchangeError  `json:"error,omitempty"`
}

type exchangeError struct {
	Message string `json:"message"`
	Code    string `json:"code,omitempty"`
}

// respond begins the response.
func (x *exchange) respond(ctx context.Context, status int, header http.Header) error {
	x.started = true
	params := struct {
		RequestID  json.RawMessage     `json:"requestId"`
		Status     int                 `json:"status"`
		StatusText string              `json:"statusText,omitempty"`
		Headers    map[string][]string `json:"headers"`
	}{x.rawID, status, http.StatusText(status), make(map[string][]string)}
	for name, values := range header {
		params.Headers[strings.ToLower(name)] = values
	}
	return x.post(ctx, "llmInference.httpResponseStart", params)
}

func (x *exchange) send(ctx context.Context, chunk responseChunk) error {
	chunk.RequestID, chunk.Binary = x.rawID, true
	return x.post(ctx, "llmInference.httpResponseChunk", chunk)
}

// post sends a part of the response and waits until the runtime has taken it. That is a handler's answer, which goes out during a stop, too.
func (x *exchange) post(ctx context.Context, method string, params any) error {
	raw, err := x.client.callAlways(ctx, method, params, nil)
	if _, refused := err.(*RPCError); refused || err == nil && string(member(raw, "accepted")) == "false" {
		return errModelUnwanted
	}
	return err
}

// checkResponse refuses what the runtime could not make a response of.
func checkResponse(resp *http.Response) error {
	if resp.StatusCode < 200 || resp.StatusCode > 599 {
		return fmt.Errorf("the transport's response has the status %d", resp.StatusCode)
	}
	for name, values := range resp.Header {
		for _, v := range values {
			if name == "" || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == ':' || r >= 0x7f }) ||
				strings.ContainsFunc(v, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
				return fmt.Errorf("the transport's response has a header that is not valid: %s", quote(name))
			}
		}
	}
	return nil
}

// endToEnd copies headers without those that belong to one connection (RFC 9110, section 7.6.1) or to the framing of a body.
func endToEnd(h http.Header) http.Header {
	kept := make(http.Header, len(h))
	drop := []string{"Host", "Content-Length", "Connection", "Keep-Alive", "Transfer-Encoding", "Upgrade", "Te", "Trailer", "Proxy-Connection"}
	for name, values := range h {
		if http.CanonicalHeaderKey(name) == "Connection" {
			for _, named := range strings.Split(strings.Join(values, ","), ",") {
				drop = append(drop, http.CanonicalHeaderKey(strings.TrimSpace(named)))
			}
		}
	}
	for name, values := range h {
		name = http.CanonicalHeaderKey(name)
		if !slices.Contains(drop, name) && !strings.HasPrefix(name, "Sec-Websocket-") {
			kept[name] = append(kept[name], values...)
		}
	}
	return kept
}

// requestBody is the body of a model request while it arrives: pieces that the reader has queued, for one goroutine to read.
type requestBody struct {
	rest []byte // decoded and not read yet; the reading goroutine's

	max   int           // bytes that may be queued
	wake  chan struct{} // capacity 1: there is news
	mu    sync.Mutex
	queue []bodyPiece
	size  int
	end   error // why nothing comes after the queue: io.EOF, or what went wrong
}

type bodyPiece struct {
	raw    json.RawMessage // a string
	binary bool
}

// push queues a piece without waiting. It reports false when too much is queued. One piece is taken whatever its size: it is here already.
func (b *requestBody) push(raw json.RawMessage, binary, last bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.end != nil {
		return true
	}
	if len(b.queue) > 0 && b.size+len(raw) > b.max {
		return false
	}
	if len(raw) > len(`""`) {
		b.queue = append(b.queue, bodyPiece{raw, binary})
		b.size += len(raw)
	}
	if last {
		b.end = io.EOF
	}
	b.notify()
	return true
}

func (b *requestBody) notify() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// fail ends the body at once.
func (b *requestBody) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.end == nil || b.end == io.EOF {
		b.end = err
	}
	b.queue, b.size = nil, 0
	b.notify()
}

// pop waits for the next piece and returns it decoded.
func (b *requestBody) pop() ([]byte, error) {
	for {
		b.mu.Lock()
		if len(b.queue) > 0 {
			p := b.queue[0]
			b.queue[0] = bodyPiece{}
			b.queue, b.size = b.queue[1:], b.size-len(p.raw)
			b.mu.Unlock()
			data, err := p.decode()
			if err != nil {
				b.fail(err)
			}
			return data, err
		}
		err := b.end
		b.mu.Unlock()
		if err != nil {
			return nil, err
		}
		<-b.wake
	}
}

func (p bodyPiece) decode() ([]byte, error) {
	text := unquote(p.raw)
	if !p.binary {
		return []byte(text), nil
	}
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		err = fmt.Errorf("a binary piece of the request body: %w", err)
	}
	return data, err
}

// length waits for the first piece and returns the body's length if that was all, else -1. Errors come out of Read.
func (b *requestBody) length() int64 {
	rest, err := b.pop()
	if err != nil && err != io.EOF {
		return -1
	}
	b.rest = rest
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.queue) == 0 && b.end == io.EOF {
		return int64(len(rest))
	}
	return -1
}

func (b *requestBody) Read(p []byte) (int, error) {
	for len(b.rest) == 0 {
		var err error
		if b.rest, err = b.pop(); err != nil {
			return 0, err
		}
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

// Close makes a Read in progress and all later ones fail.
func (b *requestBody) Close() error {
	b.fail(errExchangeOver)
	return nil
}

// ---- telemetry ----

const (
	maxTelemetry      = 1024    // events waiting for Options.OnGitHubTelemetry
	maxTelemetryBytes = 8 << 20 // the same in bytes
)

// GitHubTelemetry is a telemetry event that the runtime forwards, see [Options.OnGitHubTelemetry].
type GitHubTelemetry struct {
	SessionID  string               `json:"sessionId"` // "" for events of no session
	Restricted bool                 `json:"restricted"`
	Event      GitHubTelemetryEvent `json:"event"`
	Raw        json.RawMessage      `json:"-"` // as received
}

// GitHubTelemetryEvent is the event proper.
type GitHubTelemetryEvent struct {
	Kind                 string                 `json:"kind"`
	CreatedAt            string                 `json:"created_at"`
	ModelCallID          string                 `json:"model_call_id"`
	Properties           map[string]string      `json:"properties"`
	Metrics              map[string]float64     `json:"metrics"`
	ExpAssignmentContext string                 `json:"exp_assignment_context"`
	Features             map[string]string      `json:"features"`
	SessionID            string                 `json:"session_id"`
	CopilotTrackingID    string                 `json:"copilot_tracking_id"`
	Client               *GitHubTelemetryClient `json:"client"`
}

// GitHubTelemetryClient describes the machine and program that an event comes from.
type GitHubTelemetryClient struct {
	CLIVersion  string `json:"cli_version"`
	OSPlatform  string `json:"os_platform"`
	OSVersion   string `json:"os_version"`
	OSArch      string `json:"os_arch"`
	NodeVersion string `json:"node_version"`
	CopilotPlan string `json:"copilot_plan"`
	ClientType  string `json:"client_type"`
	ClientName  string `json:"client_name"`
	IsStaff     bool   `json:"is_staff"`
	DevDeviceID string `json:"dev_device_id"`
	CPUModel    string `json:"cpu_model"`
	CPUCount    int    `json:"cpu_count"`
}

// telemetry hands events to the host one after the other. There is a goroutine only while there is one to hand over.
type telemetry struct {
	work limiter // of one at a time, which keeps their order

	mu      sync.Mutex
	queue   []json.RawMessage
	size    int
	dropped int // since the last one that was handed over
}

// push queues an event, on the reader. When too many wait, the oldest are dropped.
func (q *telemetry) push(c *Client, params json.RawMessage) {
	q.mu.Lock()
	before := len(q.queue)
	q.queue = append(q.queue, params)
	q.size += len(params)
	for len(q.queue) > maxTelemetry || len(q.queue) > 1 && q.size > maxTelemetryBytes {
		q.popLocked()
		q.dropped++
	}
	grown := len(q.queue) > before
	q.mu.Unlock()
	if grown { // else those that wait already will do
		q.work.run(func() { q.deliver(c) })
	}
}

func (q *telemetry) popLocked() (params json.RawMessage) {
	if len(q.queue) > 0 {
		params, q.queue[0] = q.queue[0], nil
		q.queue, q.size = q.queue[1:], q.size-len(params)
	}
	return params
}

// deliver hands over the oldest event.
func (q *telemetry) deliver(c *Client) {
	q.mu.Lock()
	params, dropped := q.popLocked(), q.dropped
	q.dropped = 0
	q.mu.Unlock()
	if dropped > 0 {
		c.log.Debug("copilot: dropped telemetry events that waited too long", "count", dropped)
	}
	if params == nil {
		return
	}
	event := GitHubTelemetry{Raw: params}
	if err := json.Unmarshal(params, &event); err != nil { // what has the expected type is there all the same
		c.log.Debug("copilot: a telemetry event of an unexpected shape", "error", err)
	}
	protect(c, func() (struct{}, error) { c.opts.OnGitHubTelemetry(event); return struct{}{}, nil }, func(struct{}, error) {})
}
