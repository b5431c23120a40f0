// Package copilot runs GitHub Copilot agent sessions from Go. It starts the Copilot CLI as a child process, or reaches one that is already
// running, and speaks the JSON-RPC 2.0 protocol of its server mode. It uses the standard library only.
//
// # Quick start
//
// [Start] launches the CLI that it finds, [Client.CreateSession] opens a session, [Session.Ask] sends a message and ranges over the events
// of its turn, [Client.Stop] leaves nothing behind:
//
//	client, err := copilot.Start(ctx, nil)
//	if err != nil {
//		return err
//	}
//	defer client.Stop(ctx)
//	session, err := client.CreateSession(ctx, &copilot.SessionConfig{Streaming: true, OnPermission: copilot.ApproveAll})
//	if err != nil {
//		return err
//	}
//	for event, err := range session.Ask(ctx, copilot.Message{Prompt: "What is in this directory?"}) {
//		if err != nil {
//			return err
//		}
//		if delta, ok := event.Payload().(*copilot.AssistantMessageDelta); ok {
//			fmt.Print(delta.DeltaContent)
//		}
//	}
//
// The CLI has to be logged in (run "copilot login" once, or set Options.GitHubToken; [Client.AuthStatus] tells), unless the session brings
// a model endpoint of its own, see [ProviderConfig]. [Dial] connects to a server on TCP, [NewClient] over any byte stream. [InstallCLI] is
// for programs that carry the CLI inside themselves.
//
// # Sessions and events
//
// A [Session] publishes an [Event] for everything that happens in it. [Session.Events] and [Session.Subscribe] see every event from their
// call on, once and in wire order. All subscribers share one ring of SessionConfig.EventBuffer events, each with a cursor of its own: one
// that falls more than the ring behind gets a [*LagError] with the exact count at the place of the gap, and goes on. [Event.Payload] decodes
// on demand; what has no type here, or a newer shape, arrives as a [*RawPayload] with its JSON untouched. [Session.History] returns what
// the server has stored, which deltas are not part of.
//
// [Client.ResumeSession] goes on with a stored session, [Client.Sessions] lists them, and [Client.WatchSharedSession] looks at one that
// somebody else runs. [Client.SubscribeLifecycle] tells what happens to all sessions of the server.
//
// # Starting without loss
//
// [Client.PrepareSession] and [Client.PrepareResumeSession] validate and allocate, and do nothing else. A subscription taken from the
// [PreparedSession] sees everything that is routed to the session from the first byte of its start on; [PreparedSession.Start] then creates
// or resumes it. A start that fails or is cancelled leaves nothing behind, here or on the server. CreateSession and ResumeSession do both
// steps: what the server sends before they return has no subscriber then.
//
// # Turns
//
// A turn is the agent's work on a message, all tool calls included. [Session.Send] returns when the server has the message.
// [Session.SendAndWait] and [Session.Ask] stay until the message's turn has ended; there is one such wait at a time in a session. Ending a
// wait early does not end the turn: [Session.Abort] does.
//
// # Handlers
//
// The agent asks its host for tools, permissions, answers and more, see [Tool], [PermissionHandler], [Hooks] and the handler fields of
// [SessionConfig]. Without OnPermission the server refuses whatever needs a permission, and that is most of what an agent does, tools of the
// host's included (unless Tool.SkipPermission is set).
//
// Each call of a handler runs on a goroutine of its own, under a context that ends with its reason to run; [context.Cause] tells which.
// Handlers may call anything on the session and the client, closing them included. A handler's panic is its failure and goes to
// Options.Logger. Nothing is approved by accident: an error, a panic and a zero value are never an approval.
//
// Options.MaxHandlers bounds two classes apart, so that neither starves the other: what the agent waits for (tools, permissions, questions,
// commands), and what the server needs before it can answer anything else (hooks, files, tokens, model traffic, prompt sections).
//
// # Stopping
//
// [Client.Stop] releases sessions, asks a launched CLI to leave, and escalates in bounded steps up to the kill. It returns nil only when
// everything is confirmed; else the error matches [ErrNotConfirmed]. Its context should not be one that has ended by then: that means to kill
// at once. [Client.ForceStop], [Client.StartForceStop] and [Client.ForceStopAndWait] do. A kill reaches the process group and, on Linux, the
// descendants that left it; on Windows, a job object. A CLI that dies by itself is reaped, and [Client.Done], [Client.Err] and every sequence tell its exit status and
// the tail of its stderr. There is no restart: Start makes a new client, ResumeSession goes on.
//
// # Errors
//
// Errors are told apart with [errors.Is] and [errors.As]: by the sentinels, such as [ErrClosed] and [ErrSessionNotFound], and by types that
// carry data, such as [*RPCError], [*ExitError] and [*SessionError]. Methods whose comments name no errors return those of [Client.Call] or
// [Session.Call]. The first cause that ends a client or session stays, and every later call returns it. Neither secrets nor session ids
// stand in their texts; [SessionError] has the id as a field.
//
// # Concurrency
//
// All methods may be called from any goroutine, handlers and loops over events included. A subscription has one consumer at a time. Events
// are shared by all subscribers: Event.Data must not be changed. Options and configurations are read during the call that they are given to,
// and never changed.
//
// # Contexts
//
// A context bounds the call it is given to, never the life of what the call returns. A call returns as soon as its context ends, whether or
// not the server reads, and its error matches both ctx.Err() and the context's cause. What was asked may still happen: cancelling is local.
// There is no hidden limit of time; Stop's is Options.StopGrace.
//
// # Limits
//
// An incoming frame may have Options.MaxFrameBytes. What the server sends for a session whose id it has yet to choose (cloud) cannot be routed
// before its answer. A command that has detached itself before a kill cannot be found, nor, on macOS and the BSDs, one that left the process
// group: Stop leaves those to the CLI, a kill misses them.
// Secrets given in options and configurations are masked in errors, logs and printed values; what a tool or the model writes into events
// is not.
//
// # Compatibility
//
// The package speaks protocol version 3 ([MinProtocolVersion], [MaxProtocolVersion]) and is tested with Copilot CLI 1.0.102; another version
// is refused with a [*ProtocolError]. Names of fields, events and methods are those of the CLI's published schemas and, where these are silent,
// of what it was seen to send. What the schema calls experimental has a paragraph that says so. Methods, events and members that a newer
// CLI adds are reached through [Client.Call], [Session.Call], [RawPayload], [Event.Decode], Options.Handlers and SessionConfig.Extra.
//
// # Differences from the official SDKs
//
// The protocol is the same, and so is most of the vocabulary. What differs here: Start both makes and starts a client, and nothing is ever
// restarted; events come as sequences, which have a place for errors, rather than by callbacks; subscriptions can be taken before a session
// starts; a slow subscriber is told what it missed; a wait has no limit but its context; one [SessionConfig] serves create and resume;
// errors are sentinels and exported types; [DenyAll] rejects with words, so that the agent goes on. The common methods of the server have typed
// helpers, all others are reached through Call.
package copilot

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The protocol versions that this package speaks.
const (
	MinProtocolVersion = 3
	MaxProtocolVersion = 3
)

// Errors that callers branch on, with errors.Is. Those that carry data are types: [RPCError], [ProtocolError], [ExitError],
// [SessionError], [SessionIDMismatchError], [LagError], [AgentError], [FrameError].
var (
	ErrClosed          = errors.New("copilot: closed")                                        // the client, session or sequence was closed on this side
	ErrInvalidConfig   = errors.New("copilot: invalid configuration")                         // options or parameters that cannot apply
	ErrAlreadyStarted  = errors.New("copilot: prepared session was started before")           // a PreparedSession starts once
	ErrSessionOpen     = errors.New("copilot: session is open on this client already")        // or is being started or left
	ErrTurnActive      = errors.New("copilot: a turn is being waited for already")            // one SendAndWait or Ask at a time
	ErrNotSupported    = errors.New("copilot: not supported by this CLI")                     // the server does not know the method or lacks the capability
	ErrSessionNotFound = errors.New("copilot: session not found")                             // the server does not have it, or no longer
	ErrAuthentication  = errors.New("copilot: authentication")                                // the server, or the model behind it, wants other credentials
	ErrCannotResume    = errors.New("copilot: stored session cannot be resumed")              // it exists and is damaged, or unreadable for this CLI
	ErrDisconnected    = errors.New("copilot: shared session disconnected")                   // the watched session ended
	ErrNotConfirmed    = errors.New("copilot: end not confirmed")                             // something was asked to end and nobody knows whether it did
	ErrCLINotFound     = errors.New("copilot: no Copilot CLI found")                          // nothing to start
	ErrFrameTooLarge   = errors.New("copilot: frame larger than the limit")                   // see Options.MaxFrameBytes
	ErrAborted         = errors.New("copilot: turn aborted")                                  // by Abort, or by a decision that ends the run
	errUnanswered      = errors.New("copilot: the server did not answer the release in time") // why a release is not confirmed
)

// RPCError is the server's answer to a request that it refused. It matches, with errors.Is, ErrNotSupported, ErrSessionNotFound,
// ErrAuthentication and ErrCannotResume where the code or, for want of one, the server's words say so.
type RPCError struct {
	Method  string
	Code    int             // JSON-RPC 2.0 code; 0 when the refusal stood in a result
	Message string          // the server's words, unchanged
	Data    json.RawMessage // nil when the server sent none

	text string // Message without secrets and session ids
}

// Error returns the method, the code and the server's words, in which secrets and session ids are masked.
func (e *RPCError) Error() string {
	text := e.text
	if text == "" {
		text = e.Message
	}
	if e.Code == 0 {
		return fmt.Sprintf("copilot: %s: %s", e.Method, text)
	}
	return fmt.Sprintf("copilot: %s: %s (code %d)", e.Method, text, e.Code)
}

// Is makes the sentinels match that the type's comment names.
func (e *RPCError) Is(target error) bool {
	words := strings.ToLower(e.Message)
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(words, p) })
	}
	notFound := has("session not found", "session file not found")
	authentication := -32003 <= e.Code && e.Code <= -32001 ||
		has("not authenticated", "please authenticate", "authentication required", "authentication failed", "unauthorized", "bad credentials")
	switch target {
	case ErrNotSupported:
		return e.Code == codeMethodNotFound
	case ErrSessionNotFound:
		return notFound
	case ErrAuthentication:
		return authentication
	case ErrCannotResume:
		return e.Method == "session.resume" && e.Code == codeInternal && !notFound && !authentication
	}
	return false
}

// ProtocolError reports a server whose protocol version this package does not speak.
type ProtocolError struct {
	Server   int    // its version; 0 when it reported none, or none that is a number
	Min, Max int    // what this package speaks
	CLI      string // which CLI: its path or address, and its version where known
}

// Error names the CLI and both sides' versions.
func (e *ProtocolError) Error() string {
	server := "no usable protocol version"
	if e.Server != 0 {
		server = "protocol version " + strconv.Itoa(e.Server)
	}
	return fmt.Sprintf("copilot: %s reports %s, this package speaks %d to %d", e.CLI, server, e.Min, e.Max)
}

// SessionIDMismatchError reports that the server opened a session under another id than the one asked for.
type SessionIDMismatchError struct{ Requested, Returned string }

// Error does not show the ids.
func (e *SessionIDMismatchError) Error() string {
	return "copilot: the server answered with another session id"
}

// SessionError says which session an error belongs to. Its text does not show the id.
type SessionError struct {
	SessionID string
	Err       error
}

// Error is the error's own text.
func (e *SessionError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *SessionError) Unwrap() error { return e.Err }

// ExitError reports that the CLI ended without having been asked to.
type ExitError struct {
	State  *os.ProcessState
	Stderr string // the tail of its stderr, at most 64 KiB, secrets masked

	command string // what was run, secrets masked
}

// Error tells the exit status, what was run, and the end of its stderr.
func (e *ExitError) Error() string {
	s := "copilot: the CLI exited: " + e.State.String()
	if e.command != "" {
		s += ": " + e.command
	}
	if tail := strings.TrimSpace(e.Stderr); tail != "" {
		s += ": " + tail[max(0, len(tail)-1024):]
	}
	return s
}

// AgentError reports that the agent's turn failed: the content of a session.error event.
type AgentError struct {
	Type       string // authentication, authorization, quota, rate_limit, context_limit, query; an open set
	Message    string
	StatusCode int    // HTTP status of the model's provider, 0 when there was none
	Code       string // the provider's own code
	URL        string // a page that helps
}

// Error tells the kind of failure and the text for people.
func (e *AgentError) Error() string {
	s := "copilot: turn failed: " + e.Type + ": " + e.Message
	if e.StatusCode != 0 {
		s += fmt.Sprintf(" (status %d)", e.StatusCode)
	}
	return s
}

// Is matches [ErrAuthentication] where the provider refused the credentials, and where there were none: CLI 1.0.102 reports a missing
// login as a failed query, so that only its words tell.
func (e *AgentError) Is(target error) bool {
	return target == ErrAuthentication && (e.Type == "authentication" || e.StatusCode == http.StatusUnauthorized ||
		e.Type == "query" && strings.Contains(e.Message, "No GitHub OAuth token"))
}

// TurnError reports that the wait for a turn ended before the turn did: ctx was done. It says what had been seen. The turn
// goes on; [Session.Abort] ends it.
type TurnError struct {
	LastEvent       EventType     // "" when none had come
	LastEventAge    time.Duration // since it came
	Events          int           // of the session, since the message was sent
	OpenTools       []string      // names of tools that were running
	OpenPermissions int           // permission requests without a decision
	Err             error         // ctx's error and cause
}

// Error tells what had been seen and what was still open.
func (e *TurnError) Error() string {
	s := fmt.Sprintf("copilot: waiting for the turn: %v: %d events", e.Err, e.Events)
	if e.LastEvent != "" {
		s += fmt.Sprintf(", last %s %v ago", e.LastEvent, e.LastEventAge.Round(time.Millisecond))
	}
	if len(e.OpenTools) > 0 {
		s += ", running tools: " + strings.Join(e.OpenTools, ", ")
	}
	if e.OpenPermissions > 0 {
		s += fmt.Sprintf(", open permission requests: %d", e.OpenPermissions)
	}
	return s
}

// Unwrap returns the cause.
func (e *TurnError) Unwrap() error { return e.Err }

// Transport is how a launched CLI is spoken to.
type Transport int

// The transports of a launched CLI.
const (
	Stdio Transport = iota // its stdin and stdout; it ends with its host
	TCP                    // a loopback port, for CLIs that other clients join: at [Client.Addr], with Options.ConnectionToken
)

// ClientMode is the set of defaults that sessions start from. With [ModeEmpty], [Start] needs Options.BaseDir or Options.SessionFS, and each
// session needs SessionConfig.AvailableTools, see [IsolatedTools]; fields whose comments say "empty mode" have the default that stands there.
type ClientMode int

// The client modes.
const (
	ModeCLI   ClientMode = iota // the CLI's own defaults
	ModeEmpty                   // nothing of the machine's or the user's that a session did not ask for
)

// Telemetry is the OpenTelemetry configuration of a launched CLI.
type Telemetry struct {
	Endpoint       string // OTLP endpoint URL
	Protocol       string // "http/json" or "http/protobuf"
	FilePath       string // file of the file exporter
	Exporter       string // "otlp-http" or "file"
	SourceName     string
	CaptureContent *bool // whether messages' contents are recorded; nil leaves the CLI's default
}

// HandlerFunc serves one request or notification of the server by name. params is as received, nil when absent. For a request,
// result is encoded as the answer; an error becomes an error answer, with code, message and data of a [*RPCError] in it. It runs on a
// goroutine of its own; ctx ends with the session it names, or the client. Result and error of a notification are ignored.
type HandlerFunc func(ctx context.Context, method string, params json.RawMessage) (result any, err error)

// Options configures a [Client]. The zero value and nil are valid. It is copied on entry and never changed.
//
// What concerns the child (CLI to Telemetry, except ConnectionToken and Mode) is for [Start]; with [Dial] and [NewClient] it has no effect, but
// GitHubToken and UseLoggedInUser are ErrInvalidConfig there, as is a ConnectionToken for a child on Stdio.
type Options struct {
	CLI                string        // the CLI's executable; "" means $COPILOT_CLI_PATH, then copilot on PATH. A .js file runs under node
	PrefixArgs         []string      // arguments before the library's own
	Args               []string      // arguments after them
	Dir                string        // the child's working directory; "" means this process's
	Env                []string      `json:",omitempty,secret"` // the child's environment, as [os/exec.Cmd.Env]; nil means os.Environ. The library's own variables come on top
	Stderr             io.Writer     `json:"-"`                 // gets a copy of the child's stderr; a writer that blocks loses text, never delays the child. Errors carry a tail in any case
	Transport          Transport     // how a launched CLI is spoken to
	Port               int           // with TCP; 0 lets the CLI choose, see [Client.Addr]
	ConnectionToken    string        `json:",omitempty,secret"` // with TCP and Dial; with TCP, "" means a fresh random one
	GitHubToken        string        `json:",omitempty,secret"` // handed over in the child's environment, never in its arguments
	UseLoggedInUser    *bool         // whether the CLI may use its stored login; nil means true unless GitHubToken is set
	BaseDir            string        // the child's COPILOT_HOME; "" leaves the CLI's default
	LogLevel           string        // of the CLI's own log files: none, error, warning, info, debug, all; "" leaves the default
	SessionIdleTimeout time.Duration // after which the CLI unloads idle sessions, in whole seconds, rounded up; 0 leaves the default
	RemoteSessions     bool          // let the CLI serve remote sessions
	Mode               ClientMode    // defaults of sessions
	Telemetry          *Telemetry    // OpenTelemetry of the child; nil leaves it off
	StopGrace          time.Duration // how long Stop waits in each of its phases; 0 means 5 s
	MaxFrameBytes      int           // largest accepted incoming body; 0 means 256 MiB
	MaxHandlers        int           // handler calls of each class that run at once, see the package documentation; further ones wait in order; 0 means 256
	Logger             *slog.Logger  `json:"-"` // diagnostics; nil is silent

	// TraceContext supplies the W3C trace context of outgoing calls; empty strings send none. Nil passes on that of the tool call whose
	// handler makes the call, see [TraceContextFrom].
	TraceContext func(ctx context.Context) (traceparent, tracestate string)
	// ListModels replaces the server's model list, for hosts that bring their own.
	ListModels func(ctx context.Context) ([]Model, error)
	// ModelTransport serves the runtime's model traffic, of all sessions, in place of the network. Its RoundTrip may stream both ways; the
	// request's context ends when the runtime cancels the request, and knows more of it, see [ModelRequestFrom].
	ModelTransport http.RoundTripper `json:"-"`
	// SessionFS makes this client serve the files of its sessions.
	SessionFS *SessionFSConfig `json:"-"`
	// OnGitHubTelemetry gets the runtime's telemetry events, in order, one at a time. Of those that wait for it the newest 1024 are kept.
	OnGitHubTelemetry func(GitHubTelemetry)
	// PluginDirs are absolute directories of built-in plugins.
	PluginDirs []string
	// Handlers serves any other request or notification of the server, by method name. A session's own Handlers come first.
	Handlers map[string]HandlerFunc
}

func clonePointer[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}

func (o *Options) clone() Options {
	if o == nil {
		return Options{}
	}
	c := *o
	c.PrefixArgs, c.Args, c.Env = slices.Clone(o.PrefixArgs), slices.Clone(o.Args), slices.Clone(o.Env)
	c.PluginDirs, c.Handlers = slices.Clone(o.PluginDirs), maps.Clone(o.Handlers)
	c.UseLoggedInUser = clonePointer(o.UseLoggedInUser)
	if c.Telemetry = clonePointer(o.Telemetry); c.Telemetry != nil {
		c.Telemetry.CaptureContent = clonePointer(o.Telemetry.CaptureContent)
	}
	c.SessionFS = clonePointer(o.SessionFS)
	return c
}

// checked returns a copy with defaults filled in, or what is wrong with the options.
func (o *Options) checked() (Options, error) {
	c := o.clone()
	for _, n := range []struct {
		name  string
		value int64
	}{{"StopGrace", int64(c.StopGrace)}, {"MaxFrameBytes", int64(c.MaxFrameBytes)}, {"MaxHandlers", int64(c.MaxHandlers)}} {
		if n.value < 0 {
			return c, fmt.Errorf("%w: %s is negative", ErrInvalidConfig, n.name)
		}
	}
	if c.Mode != ModeCLI && c.Mode != ModeEmpty {
		return c, fmt.Errorf("%w: unknown Mode %d", ErrInvalidConfig, c.Mode)
	}
	for _, dir := range c.PluginDirs {
		if !filepath.IsAbs(dir) {
			return c, fmt.Errorf("%w: PluginDirs: %q is not absolute", ErrInvalidConfig, dir)
		}
	}
	if err := c.SessionFS.checked(); err != nil {
		return c, err
	}
	if c.StopGrace == 0 {
		c.StopGrace = 5 * time.Second
	}
	if c.MaxFrameBytes == 0 {
		c.MaxFrameBytes = defaultMaxFrame
	}
	if c.MaxHandlers == 0 {
		c.MaxHandlers = 256
	}
	if c.Logger == nil {
		c.Logger = slog.New(discardHandler{})
	}
	return c, nil
}

// ServerInfo is what the server said of itself in the handshake.
type ServerInfo struct {
	ProtocolVersion int
	Version         string // of the CLI; "" from servers too old to say
}

// StartupTimings says where the time of a start went. Phases that did not occur are zero.
type StartupTimings struct {
	Total     time.Duration
	Spawn     time.Duration // finding and launching the process
	PortWait  time.Duration // until a TCP server announced its port
	Connect   time.Duration // the TCP connection
	Handshake time.Duration // from the first request to the last setup answer
}

// Client is a connection to one Copilot CLI server, and the owner of the process behind it when [Start] launched one. All its
// methods may be called from any goroutine, handlers and loops over events included. A client that is no longer needed
// must be stopped with [Client.Stop] or one of the forced stops.
type Client struct {
	opts    *Options // behind a pointer, so that printing the client shows no secret
	conn    *conn
	proc    *process  // nil unless Start launched one
	peer    string    // which CLI, for error texts
	addr    string    // where it listens, "" for other streams
	secrets *[]string // of the options, which no text may show, nor printing the client
	log     *slog.Logger
	server  ServerInfo
	timings StartupTimings

	ctx       context.Context // ends with the client; parent of handlers' contexts that belong to no session
	cancel    context.CancelCauseFunc
	lifecycle *ring[LifecycleEvent]
	types     eventTypes // the reader's
	agentWork limiter    // handler calls that the agent waits for
	hostWork  limiter    // handler calls that the server needs before it can go on
	requests  tasks      // direct requests of the server in flight, for all sessions
	done      chan struct{}
	stopping  atomic.Bool // Stop or a forced stop has begun: ends are clean from here on

	mu       sync.Mutex
	routes   map[string]route    // by session id
	releases map[string]*release // in flight, by session id
	stop     *stopRun

	models models
	host   *host // behind a pointer, as opts
}

// Start launches a CLI and connects to it. ctx bounds the start only. An error leaves no process behind. It is typed:
// ErrInvalidConfig, ErrCLINotFound, [*ExitError] when the CLI ended first, [*ProtocolError], [*RPCError], [*FrameError], or ctx's.
func Start(ctx context.Context, opts *Options) (*Client, error) {
	begun := time.Now()
	o, err := opts.checked()
	if err != nil {
		return nil, err
	}
	switch {
	case o.Transport == Stdio && o.ConnectionToken != "":
		return nil, fmt.Errorf("%w: ConnectionToken is for TCP", ErrInvalidConfig)
	case o.Mode == ModeEmpty && o.BaseDir == "" && o.SessionFS == nil:
		return nil, fmt.Errorf("%w: ModeEmpty needs BaseDir or SessionFS", ErrInvalidConfig)
	}
	if o.Transport == TCP && o.ConnectionToken == "" {
		o.ConnectionToken = newUUID()
	}
	cmd, err := newCommand(&o)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, contextError(ctx)
	}
	proc, err := cmd.start()
	if err != nil {
		return nil, err
	}
	var timings StartupTimings
	timings.Spawn = time.Since(begun)
	var rwc io.ReadWriteCloser = &stdioPipes{proc.stdout, proc.stdin}
	if o.Transport == TCP {
		if rwc, err = dialProcess(ctx, proc, &timings); err != nil {
			return nil, abandon(proc, &nestedError{fmt.Errorf("copilot: start %s", cmd), err})
		}
	}
	c := newClient(o, rwc, proc, cmd.String())
	c.timings = timings
	if tcp, ok := rwc.(net.Conn); ok {
		c.addr = tcp.RemoteAddr().String()
	}
	if err := c.handshake(ctx); err != nil {
		c.ForceStop()
		return nil, abandon(proc, err)
	}
	c.timings.Total = time.Since(begun)
	return c, nil
}

// abandon ends the process of a start that did not succeed, and returns the reason for that.
func abandon(proc *process, err error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if _, killErr := proc.forceStop().Wait(ctx); killErr != nil {
		return errors.Join(err, killErr)
	}
	return err
}

// dialProcess connects to a CLI that was started in TCP mode.
func dialProcess(ctx context.Context, proc *process, timings *StartupTimings) (io.ReadWriteCloser, error) {
	begun := time.Now()
	port, err := proc.listenPort(ctx)
	if err != nil {
		return nil, err
	}
	timings.PortWait = time.Since(begun)
	begun = time.Now()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	timings.Connect = time.Since(begun)
	if err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("connect: %w", contextError(ctx))
	}
	return conn, err
}

// stdioPipes is the parent's end of a child's stdin and stdout.
type stdioPipes struct {
	io.ReadCloser
	io.WriteCloser
}

func (p *stdioPipes) Close() error { return errors.Join(p.WriteCloser.Close(), p.ReadCloser.Close()) }

// Dial connects to a CLI server that listens on TCP: "host:port", "http://host:port" or a port of this machine. Such a server is left,
// never shut down. ctx bounds the connection and the handshake only. Errors are the dialer's, or as those of [Start]; a ConnectionToken that
// the server refuses is ErrAuthentication.
func Dial(ctx context.Context, addr string, opts *Options) (*Client, error) {
	begun := time.Now()
	o, err := opts.checkedExternal()
	if err != nil {
		return nil, err
	}
	if addr, err = parseAddr(addr); err != nil {
		return nil, err
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		if ctx.Err() != nil {
			err = contextError(ctx)
		}
		return nil, fmt.Errorf("copilot: connect to %s: %w", addr, err)
	}
	connected := time.Since(begun)
	c, err := attach(ctx, o, conn, addr, begun)
	if err != nil {
		return nil, err
	}
	c.timings.Connect, c.addr = connected, addr
	return c, nil
}

// NewClient connects over a byte stream: a tunnel, a pipe, a test. The client owns conn from here on and closes it, also when NewClient
// fails. Reads and writes must return once it is closed. ctx bounds the handshake only. Errors are as those of [Start].
func NewClient(ctx context.Context, conn io.ReadWriteCloser, opts *Options) (*Client, error) {
	if conn == nil {
		return nil, fmt.Errorf("%w: conn is nil", ErrInvalidConfig)
	}
	o, err := opts.checkedExternal()
	if err != nil {
		conn.Close()
		return nil, err
	}
	return attach(ctx, o, conn, "the peer", time.Now())
}

func (o *Options) checkedExternal() (Options, error) {
	c, err := o.checked()
	if err == nil && (c.GitHubToken != "" || c.UseLoggedInUser != nil) {
		err = fmt.Errorf("%w: GitHubToken and UseLoggedInUser are for a CLI that Start launches", ErrInvalidConfig)
	}
	return c, err
}

func attach(ctx context.Context, o Options, rwc io.ReadWriteCloser, peer string, begun time.Time) (*Client, error) {
	c := newClient(o, rwc, nil, peer)
	if err := c.handshake(ctx); err != nil {
		c.ForceStop()
		return nil, err
	}
	c.timings.Total = time.Since(begun)
	return c, nil
}

func newClient(o Options, rwc io.ReadWriteCloser, proc *process, peer string) *Client {
	secrets := secretsOf(&o)
	c := &Client{
		opts: &o, proc: proc, peer: peer, secrets: &secrets, log: o.Logger,
		lifecycle: newRing[LifecycleEvent](lifecycleBuffer),
		types:     make(eventTypes),
		done:      make(chan struct{}),
		routes:    make(map[string]route),
		releases:  make(map[string]*release),
	}
	c.agentWork.max, c.hostWork.max = o.MaxHandlers, o.MaxHandlers
	c.host = newHost()
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	c.conn = newConn(rwc, o.MaxFrameBytes, o.Logger)
	c.conn.handle, c.conn.explain, c.conn.ended = c.dispatch, c.explain, c.connectionEnded
	c.conn.start()
	go c.supervise() // owned by the client; ends when connection and process have
	return c
}

// handshake agrees on the protocol version and sets up what the options ask for.
func (c *Client) handshake(ctx context.Context) error {
	begun := time.Now()
	defer func() { c.timings.Handshake = time.Since(begun) }()
	params := struct {
		Token     string `json:"token,omitempty"`
		Telemetry bool   `json:"enableGitHubTelemetryForwarding,omitempty"`
	}{c.opts.ConnectionToken, c.opts.OnGitHubTelemetry != nil}
	raw, err := c.call(ctx, "connect", params, nil)
	if errors.Is(err, ErrNotSupported) { // servers from before connect
		raw, err = c.call(ctx, "ping", nil, nil)
	}
	if err != nil {
		return &nestedError{fmt.Errorf("copilot: handshake with %s", c.peer), err}
	}
	c.server.Version = unquote(member(raw, "version"))
	version, err := strconv.Atoi(string(member(raw, "protocolVersion")))
	if err != nil || version < MinProtocolVersion || version > MaxProtocolVersion {
		cli := c.peer
		if c.server.Version != "" {
			cli += ", version " + c.server.Version
		}
		return &ProtocolError{Server: version, Min: MinProtocolVersion, Max: MaxProtocolVersion, CLI: cli}
	}
	c.server.ProtocolVersion = version
	if err := c.setUp(ctx); err != nil {
		return &nestedError{fmt.Errorf("copilot: handshake with %s", c.peer), err}
	}
	return nil
}

// setUp sends the requests that must come before the first session.
func (c *Client) setUp(ctx context.Context) error {
	if len(c.opts.PluginDirs) > 0 {
		params := map[string]any{"paths": c.opts.PluginDirs}
		if _, err := c.call(ctx, "plugins.builtin.set", params, nil); err != nil {
			return err
		}
	}
	return c.setUpHosting(ctx)
}

// call is conn.call for a client that has not been stopped. Errors of the server lose what their text must not show.
func (c *Client) call(ctx context.Context, method string, params any, then func(json.RawMessage, error)) (json.RawMessage, error) {
	if c.stopping.Load() {
		return nil, ErrClosed
	}
	return c.callAlways(ctx, method, params, then)
}

// callAlways is call for the requests of the stop itself.
func (c *Client) callAlways(ctx context.Context, method string, params any, then func(json.RawMessage, error)) (json.RawMessage, error) {
	return c.do(ctx, &call{method: method, then: then}, params)
}

func (c *Client) do(ctx context.Context, cl *call, params any) (json.RawMessage, error) {
	raw, err := c.conn.call(ctx, cl, params)
	if rpc, ok := err.(*RPCError); ok {
		rpc.text = c.mask(rpc.Message, params)
	}
	return raw, err
}

// mask hides this client's secrets and session ids in a text of the server's: those of open sessions and the one that params name.
func (c *Client) mask(text string, params any) string {
	hide := slices.Clone(*c.secrets)
	if raw, err := marshal(params); err == nil {
		hide = append(hide, unquote(member(raw, "sessionId")))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, r := range c.routes {
		hide = append(hide, id)
		if r.session != nil {
			hide = append(hide, *r.session.secrets...)
		}
	}
	return mask(text, hide)
}

// Call makes any request of the server's protocol. params must marshal to JSON, nil sends {}; the result is unmarshalled into
// result unless that is nil. It waits as long as ctx lasts; an answer that comes later is dropped. Errors are [*RPCError], ctx's,
// ErrClosed, or the reason why the connection ended.
func (c *Client) Call(ctx context.Context, method string, params, result any) error {
	raw, err := c.call(ctx, method, params, nil)
	if err != nil {
		return err
	}
	if method == "sessions.close" {
		c.closed(params)
	}
	return decodeResult(method, raw, result)
}

// closed ends a watch whose id the host has closed by a call of its own.
func (c *Client) closed(params any) {
	raw, _ := marshal(params) // it was marshalled before
	c.mu.Lock()
	r := c.routes[unquote(member(raw, "sessionId"))]
	c.mu.Unlock()
	if r.watch != nil {
		r.watch.end(ErrClosed)
	}
}

// decodeResult unmarshals a result. An absent or null result leaves the target as it is.
func decodeResult(method string, raw json.RawMessage, result any) error {
	if result == nil || len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	if err := json.Unmarshal(raw, result); err != nil {
		return fmt.Errorf("copilot: result of %s: %w", method, clipped{err})
	}
	return nil
}

// refused is the error for a request about a session that the server answered with a refusal in its own words.
func (c *Client) refused(method, words, sessionID string) error {
	if words == "" {
		words = "refused"
	}
	text := c.mask(words, map[string]string{"sessionId": sessionID})
	return &SessionError{SessionID: sessionID, Err: &RPCError{Method: method, Message: words, text: text}}
}

// PID returns the process id of the CLI that this client launched, 0 when it launched none.
func (c *Client) PID() int {
	if c.proc == nil {
		return 0
	}
	return c.proc.pid()
}

// Addr returns the host:port of a CLI that is spoken to over TCP, for [Dial]s of others, who need its Options.ConnectionToken, too; else "".
func (c *Client) Addr() string { return c.addr }

// Server returns what the server said of itself.
func (c *Client) Server() ServerInfo { return c.server }

// Timings returns where the time of the start went.
func (c *Client) Timings() StartupTimings { return c.timings }

// Done returns a channel that is closed when the connection has ended and the process, if this client launched one, is reaped.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns nil before Done; then why the client ended: ErrClosed after a stop, else the first cause.
func (c *Client) Err() error {
	select {
	case <-c.done:
		return c.conn.failure()
	default:
		return nil
	}
}

// explain turns the bare end of a stream into the reason behind it. It may wait up to a second for the process's exit status.
func (c *Client) explain(err error) error {
	if c.stopping.Load() {
		return ErrClosed
	}
	if frame, ok := err.(*FrameError); ok {
		frame.Quote = c.mask(frame.Quote, nil)
		return err
	}
	if c.proc != nil {
		timer := time.NewTimer(settle)
		defer timer.Stop()
		select {
		case <-c.proc.exited():
			exit := c.proc.exitError()
			exit.command = c.peer
			return exit
		case <-timer.C:
		}
	}
	return fmt.Errorf("copilot: connection lost: %w", err)
}

// connectionEnded ends everything that hangs on the connection, with its cause.
func (c *Client) connectionEnded(cause error) {
	c.mu.Lock()
	routes := c.routes
	c.routes = make(map[string]route)
	c.mu.Unlock()
	for _, r := range routes {
		r.end(cause)
	}
	c.lifecycle.end(sequenceEnd(cause))
	c.cancel(cause)
}

// sequenceEnd is the last error of sequences for an end with this cause: none when it was closed on this side.
func sequenceEnd(cause error) error {
	if cause == ErrClosed {
		return nil
	}
	return cause
}

// supervise waits for the end of the connection, makes the process follow it, and tells Done.
func (c *Client) supervise() {
	<-c.conn.done
	if c.proc == nil || c.opts.Transport == TCP {
		c.conn.rwc.Close()
	}
	if c.proc != nil {
		if !c.stopping.Load() {
			if err := c.proc.end(context.Background(), c.opts.StopGrace, false); err != nil {
				c.log.Error("copilot: the CLI outlives its connection", "error", err)
			}
		}
		<-c.proc.exited()
		<-c.conn.readDone // soon after the exit, see process.go
		c.conn.rwc.Close()
	}
	close(c.done)
}

// stopRun is the one graceful stop of a client. It goes on when its callers have gone.
type stopRun struct {
	ctx   context.Context // ends when a caller's has: straight to the kill then
	hurry context.CancelFunc
	done  chan struct{}
	err   error // valid after done
}

// Stop ends the client in good order: it refuses new calls, releases all sessions and watches at once (what is stored stays and can
// be resumed), asks a launched CLI to shut down, closes its stdin and waits, then terminates and at last kills it with its
// descendants. Options.StopGrace bounds each of these steps. When ctx ends, Stop goes straight to the kill and waits at most a second
// more, so that a deferred Stop needs a context that lives as long. An external server is left, not shut down.
//
// It returns nil only when everything is confirmed: each session released and the process reaped. Otherwise the error matches
// ErrNotConfirmed and holds a [*SessionError] for each session in doubt. Calls may be concurrent and repeated and have one outcome.
// Handlers' contexts end; Stop never waits for handlers, and may be called from one.
func (c *Client) Stop(ctx context.Context) error {
	c.mu.Lock()
	run := c.stop
	if run == nil {
		run = &stopRun{done: make(chan struct{})}
		run.ctx, run.hurry = context.WithCancel(context.Background())
		c.stop = run
		c.stopping.Store(true)
		go c.runStop(run) // owned by the client; each of its steps is bounded
	}
	c.mu.Unlock()
	select {
	case <-run.done:
	case <-ctx.Done():
		run.hurry()
		<-run.done // within a second
	}
	return run.err
}

func (c *Client) runStop(run *stopRun) {
	defer close(run.done)
	defer run.hurry()
	var errs []error
	asked := false // to shut down
	if c.conn.failure() == nil {
		phase, cancel := context.WithTimeout(run.ctx, c.opts.StopGrace)
		errs = c.releaseAll(phase)
		cancel()
		if c.proc != nil {
			phase, cancel := context.WithTimeout(run.ctx, c.opts.StopGrace)
			_, err := c.callAlways(phase, "runtime.shutdown", nil, nil)
			var refused *RPCError
			asked = !errors.As(err, &refused) && phase.Err() == nil
			cancel()
		}
	}
	if c.proc != nil {
		if err := c.proc.end(run.ctx, c.opts.StopGrace, asked); err != nil {
			errs = append(errs, err)
		}
	}
	c.conn.fail(ErrClosed)
	bound, cancel := context.WithTimeout(context.Background(), settle)
	defer cancel()
	for _, end := range []struct {
		what string
		done <-chan struct{}
	}{{"reader", c.conn.readDone}, {"writer", c.conn.writeDone}} {
		select {
		case <-end.done:
		case <-bound.Done():
			if !isClosed(end.done) {
				errs = append(errs, fmt.Errorf("%w: the connection's %s did not return", ErrNotConfirmed, end.what))
			}
		}
	}
	select { // so that Done and Err can be relied on; what keeps it is in errs
	case <-c.done:
	case <-bound.Done():
	}
	run.err = errors.Join(errs...)
}

// releaseAll releases every session and watch at once and returns an error for each that was not confirmed.
func (c *Client) releaseAll(ctx context.Context) (errs []error) {
	c.mu.Lock()
	routes := make([]route, 0, len(c.routes))
	for _, r := range c.routes {
		routes = append(routes, r)
	}
	c.mu.Unlock()
	releases := make(map[*release]bool)
	for _, r := range routes {
		if rel := r.release(); rel != nil {
			releases[rel] = true
		} else {
			r.end(ErrClosed) // a start without an answer; what that brings is released when it comes
		}
	}
	c.mu.Lock()
	for _, rel := range c.releases { // those that were in flight before, too
		releases[rel] = true
	}
	c.mu.Unlock()
	for rel := range releases {
		if err := rel.wait(ctx); err != nil {
			errs = append(errs, &SessionError{SessionID: rel.id, Err: &nestedError{fmt.Errorf("%w: session", ErrNotConfirmed), err}})
		}
	}
	for _, r := range routes {
		r.end(ErrClosed)
	}
	return errs
}

// ForceStop kills a launched CLI and its descendants now, closes the connection and returns without waiting for either. Sessions end as
// by [Client.Stop], but the server is not told.
func (c *Client) ForceStop() { c.StartForceStop() }

// StartForceStop is [Client.ForceStop] with a handle to the outcome. The kill has been delivered when it returns.
func (c *Client) StartForceStop() *ForcedShutdown {
	c.stopping.Store(true)
	c.mu.Lock()
	if c.stop != nil {
		c.stop.hurry()
	}
	c.mu.Unlock()
	f := noShutdown()
	if c.proc != nil {
		f = c.proc.forceStop()
	}
	c.conn.fail(ErrClosed)
	return f
}

// ForceStopAndWait is [Client.StartForceStop] and a wait for its outcome: how the process ended, nil when there never was one. ctx bounds
// the wait only.
func (c *Client) ForceStopAndWait(ctx context.Context) (*os.ProcessState, error) {
	return c.StartForceStop().Wait(ctx)
}

// Session is one conversation on the server that this client takes part in. All its methods may be called from any goroutine,
// handlers and loops over its events included.
//
// It ends once: by [Session.Disconnect] or a stop of the client, when the server has deleted or forgotten it, or with the connection.
// Sequences then yield what was published before and end, with the cause as last pair unless it was closed on this side; everything
// that waits, and every later call, returns the cause.
type Session struct {
	client  *Client
	kind    startKind
	ring    *ring[Event]
	ctx     context.Context
	cancel  context.CancelCauseFunc
	host    handlers
	tasks   tasks
	secrets *[]string // values of the configuration that no text may show, nor printing the session
	hosted  *hosted   // behind a pointer, as secrets

	// Guarded by client.mu. id is "" until the server has chosen it, and does not change after the start.
	id        string
	phase     phase
	start     *start
	live      bool     // events are for this session: its request is on its way or was answered
	releasing *release // not nil from phase leaving on

	mu            sync.Mutex // never held over I/O or host code
	workspacePath string
	remoteURL     string
	capabilities  Capabilities
	canvases      []OpenCanvas
	turns         turns
}

func newSession(c *Client, id string, kind startKind, cfg *SessionConfig) *Session {
	size := cfg.EventBuffer
	if size == 0 {
		size = defaultEventBuffer
	}
	s := &Session{
		client: c, id: id, kind: kind,
		ring: newRing[Event](size),
		host: cfg.handlers(),
	}
	s.turns.busy = kind == startResume // the server may be in the middle of something
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	return s
}

// ID returns the session's id.
func (s *Session) ID() string { return s.id }

// Client returns the client that the session belongs to.
func (s *Session) Client() *Client { return s.client }

// WorkspacePath returns the directory in which the server keeps the session's state, "" when it has none.
func (s *Session) WorkspacePath() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.workspacePath
}

// RemoteURL returns the web page of a remote session, "" for others.
func (s *Session) RemoteURL() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.remoteURL
}

// Context returns a context that is done when the session has ended; context.Cause says why. Handlers' contexts derive from it.
func (s *Session) Context() context.Context { return s.ctx }

// failure is why the session ended, nil while it has not.
func (s *Session) failure() error { return context.Cause(s.ctx) }

// Subscribe returns a subscription that begins with the next event. It should be closed when it is no longer wanted.
func (s *Session) Subscribe() *Subscription[Event] { return s.ring.subscribe() }

// Events subscribes, now, and returns the sequence of the events that follow, see [Subscription.All]. The subscription ends with the loop
// or with ctx. The sequence can be ranged once; it need not be ranged at all.
func (s *Session) Events(ctx context.Context) iter.Seq2[Event, error] { return s.Subscribe().once(ctx) }

// deliver publishes an event, on the reader. What the session itself knows is up to date before a subscriber can see the event.
func (s *Session) deliver(e Event) {
	s.mu.Lock()
	switch e.Type {
	case EventCapabilitiesChanged:
		s.capabilities.merge(e.Data)
	case EventSessionCanvasOpened:
		var canvas OpenCanvas
		if e.Decode(&canvas) == nil {
			s.putCanvasLocked(canvas)
		}
	case EventSessionCanvasClosed:
		s.dropCanvasLocked(unquote(member(e.Data, "instanceId")))
	}
	s.turns.event(&e, s.ring.publish(e))
	s.mu.Unlock()
	s.react(&e)
}

// end ends the session, once: route, sequences, turn, handlers.
func (s *Session) end(cause error) {
	c := s.client
	c.mu.Lock()
	if c.routes[s.id].session == s {
		delete(c.routes, s.id)
	}
	c.unregisterLocked(s)
	c.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failure() != nil {
		return
	}
	s.ring.end(sequenceEnd(cause))
	s.turns.over(cause, s.ring.position())
	s.cancel(cause)
}

// leave asks the server to let go of the session, once, and ends the contexts of handlers in flight with cause. It returns nil for a session that
// the server does not have. Requests of the server are served until it has answered.
func (s *Session) leave(cause error) *release {
	c := s.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.routes[s.id].session == s && (s.phase == open || s.phase == starting && s.start.accepted) {
		s.phase = leaving
		s.releasing = c.releaseLocked(s.id, "session.destroy")
		s.tasks.release(cause)
	}
	return s.releasing
}

// Disconnect leaves the session: the server keeps what is stored, and the session can be resumed. It returns nil when the server has let go,
// also where it had before. The session ends with ErrClosed in any case; when ctx ends first, the release goes on in the background,
// and a start under the same id waits for it. Handlers' contexts end; Disconnect never waits for handlers and may be called from one.
func (s *Session) Disconnect(ctx context.Context) error {
	r := s.leave(errLeaving)
	if r == nil {
		err := s.failure()
		if err == nil {
			err = s.client.conn.failure() // which is about to end the session
		}
		if err != nil && !errors.Is(err, ErrClosed) && !errors.Is(err, ErrSessionNotFound) {
			return &SessionError{SessionID: s.id, Err: err}
		}
		return nil
	}
	err := r.wait(ctx)
	s.end(ErrClosed)
	if err != nil {
		return &SessionError{SessionID: s.id, Err: err}
	}
	return nil
}

// call makes a request that belongs to the session. then is as in call.then: it runs once, whatever happens.
func (s *Session) call(ctx context.Context, method string, params any, then func(json.RawMessage, error)) (json.RawMessage, error) {
	own, err := s.callParams(params)
	if err != nil {
		if then != nil {
			then(nil, err)
		}
		return nil, s.errorFor(err)
	}
	raw, err := s.client.do(ctx, &call{method: method, then: then, until: s.ctx.Done()}, own)
	if errors.Is(err, ErrSessionNotFound) {
		s.end(s.errorFor(err))
	}
	if cause := s.failure(); err != nil && cause != nil && ctx.Err() == nil {
		err = cause
	}
	if err != nil {
		return nil, s.errorFor(err)
	}
	return raw, nil
}

// callParams completes the params of a call, or says why there can be none.
func (s *Session) callParams(params any) (json.RawMessage, error) {
	if err := s.failure(); err != nil {
		return nil, err
	}
	s.client.mu.Lock()
	left := s.phase == leaving
	s.client.mu.Unlock()
	if left || s.client.stopping.Load() {
		return nil, ErrClosed
	}
	return withSession(s.id, params)
}

func (s *Session) errorFor(err error) error {
	if _, ok := err.(*SessionError); ok {
		return err
	}
	return &SessionError{SessionID: s.id, Err: err}
}

// Call makes any request of the server's session protocol; it adds the session's id to params, which must marshal to a JSON object or be nil.
// See [Client.Call]. Errors are a [*SessionError] around the cause. An answer that the session does not exist ends it.
func (s *Session) Call(ctx context.Context, method string, params, result any) error {
	raw, err := s.call(ctx, method, params, nil)
	if err != nil {
		return err
	}
	if err := decodeResult(method, raw, result); err != nil {
		return s.errorFor(err)
	}
	return nil
}

// Send gives the agent a message and returns its id as soon as the server has it; the turn's events follow. While a turn runs, Message.Mode
// decides whether the message waits or steers it. Messages that are sent one after the other keep their order; concurrent calls have none.
// Errors are as those of [Session.Call].
func (s *Session) Send(ctx context.Context, m Message) (messageID string, err error) {
	s.mu.Lock()
	was := s.turns.busy
	s.turns.busy = true // an idle that comes from here on may be this message's
	s.mu.Unlock()
	raw, err := s.send(ctx, m, nil)
	if err != nil {
		s.turns.notBegun(s, was, err)
		return "", err
	}
	return unquote(member(raw, "messageId")), nil
}

func (s *Session) send(ctx context.Context, m Message, then func(json.RawMessage, error)) (json.RawMessage, error) {
	params, err := m.encode(s.id)
	if err != nil {
		if then != nil {
			then(nil, err)
		}
		return nil, err
	}
	if m.Traceparent == "" && m.Tracestate == "" {
		params = s.client.withTrace(ctx, params)
	}
	return s.call(ctx, "session.send", params, then)
}

// History returns the persisted events of the session, oldest first, in one answer of at most Options.MaxFrameBytes. Ephemeral events, deltas
// among them, are not stored. Entries that are no events are left out.
func (s *Session) History(ctx context.Context) ([]Event, error) {
	var result struct {
		Events []json.RawMessage `json:"events"`
	}
	if err := s.Call(ctx, "session.getMessages", nil, &result); err != nil {
		return nil, err
	}
	events := make([]Event, 0, len(result.Events))
	for _, raw := range result.Events {
		var e Event
		if err := e.UnmarshalJSON(raw); err != nil {
			s.client.log.Warn("copilot: left an entry out of a history", "error", err)
			continue
		}
		events = append(events, e)
	}
	return events, nil
}

// Abort ends the running turn, if there is one, and empties the queue. Contexts of handlers that the turn waits for end with ErrAborted.
func (s *Session) Abort(ctx context.Context) error {
	var result outcome
	running := s.tasks.ofTurn("")
	if err := s.Call(ctx, "session.abort", nil, &result); err != nil {
		return err
	}
	if result.Error != "" { // without one there was nothing to abort
		if err := result.refusal(s.client, "session.abort", s.id); err != nil {
			return err
		}
	}
	cancelTasks(running, ErrAborted) // as the abort event does, where there was a turn to say it
	return nil
}

// SendAndWait sends a message and waits for the end of its turn, and of those of messages queued behind it, since the server reports the
// end of all as one. It returns the main agent's last message in answer to m, nil when there was none. Errors: [*AgentError] when the turn
// failed; ErrAborted, with the last message; ErrTurnActive when another SendAndWait or Ask of this session is in progress; [*TurnError]
// around ctx's error; or the end of the session. There is no limit of time but ctx's. A turn whose wait ends early goes on;
// [Session.Abort] ends it.
func (s *Session) SendAndWait(ctx context.Context, m Message) (*AssistantMessage, error) {
	t, err := s.begin(ctx, m)
	if err != nil {
		return nil, err
	}
	defer s.abandon(t)
	select {
	case <-t.done:
	case <-ctx.Done():
		return nil, t.expired(ctx)
	}
	if t.last == nil {
		return nil, t.err
	}
	switch p := t.last.Payload().(type) {
	case *AssistantMessage:
		return p, t.err
	case *RawPayload:
		return nil, errors.Join(t.err, p.Err)
	}
	return nil, t.err
}

// Ask sends a message when it is ranged, and yields the events of its turn until that ends. Pairs are as in [Subscription.All]; the last one has the error
// where [Session.SendAndWait] would return one. Leaving the loop early, or cancelling ctx, does not abort the turn. The turn's end does
// not depend on a consumer that keeps pace.
func (s *Session) Ask(ctx context.Context, m Message) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		sub := s.ring.subscribe()
		defer sub.Close()
		t, err := s.begin(ctx, m)
		if err != nil {
			yield(Event{}, err)
			return
		}
		defer s.abandon(t)
		select { // until it is known where the turn begins
		case <-t.settled:
		case <-ctx.Done():
			yield(Event{}, t.expired(ctx))
			return
		}
		begin, _ := t.bounds()
		sub.seek(begin)
		for {
			e, err := sub.readUntil(ctx, t.done)
			_, end := t.bounds()
			switch lag, lagged := err.(*LagError); {
			case lagged && sub.pos > end: // the gap reaches beyond the turn
				if lag.Skipped -= sub.pos - end; lag.Skipped > 0 && !yield(Event{}, lag) {
					return
				}
			case lagged:
				if !yield(Event{}, err) {
					return
				}
				continue
			case ctx.Err() != nil:
				yield(Event{}, t.expired(ctx))
				return
			case err == nil && sub.pos <= end:
				if !yield(e, nil) {
					return
				}
				continue
			}
			<-t.done // closed: there is no other way here
			if t.err != nil {
				yield(Event{}, t.err)
			}
			return
		}
	}
}

// turns is what a session knows of its turns. It is guarded by Session.mu.
//
// The server marks the end of everything with session.idle, not the end of one message's turn; this tells which idle belongs to whom.
type turns struct {
	busy   bool  // something was begun, by whomever, and no idle has come since: one is owed, also after an error or abort that ended a turn
	active *turn // the one that is waited for

	logging int             // Log calls with level error in flight: an error event may be theirs
	recent  []string        // ids of the error events that came meanwhile
	logged  map[string]bool // ids of error events that Log has caused and that have not come yet
}

// turn is one message and what the server makes of it, until it ends.
type turn struct {
	session *Session
	settled chan struct{} // closed when begin is final
	done    chan struct{} // closed when the turn is over; err, last and end are final then
	err     error
	last    *Event // the main agent's last assistant.message for us

	// Guarded by Session.mu.
	id       string
	answered bool
	started  bool       // its user.message was seen: what came before it belongs to others
	earlier  bool       // an earlier run may own the next idle
	early    []numbered // what came before the answer and may be the turn's
	held     []numbered // errors that may be our own Log's, and what ended the turn after them
	doubt    error      // one that an earlier run may explain
	begin    uint64     // number of its first event
	end      uint64     // number after its last event
	backstop *time.Timer

	events int
	seen   EventType
	seenAt time.Time
	tools  map[string]string // running, by call id
	asks   map[string]bool   // open permission requests
}

type numbered struct {
	event Event
	n     uint64
}

const maxEarly = 4096 // events, or ids of some, kept while a send or a Log is unanswered

// begin takes the session's turn slot and sends the message.
func (s *Session) begin(ctx context.Context, m Message) (*turn, error) {
	if ctx.Err() != nil {
		return nil, s.errorFor(contextError(ctx))
	}
	t := &turn{session: s, settled: make(chan struct{}), done: make(chan struct{}), end: ^uint64(0)}
	s.mu.Lock()
	if s.turns.active != nil {
		s.mu.Unlock()
		return nil, s.errorFor(ErrTurnActive)
	}
	was := s.turns.busy
	t.earlier = was
	s.turns.active, s.turns.busy = t, true
	s.mu.Unlock()
	if _, err := s.send(ctx, m, t.answer); err != nil {
		s.turns.notBegun(s, was, err)
		s.abandon(t)
		switch {
		case t.isOver() && t.err != nil: // the session's end tells more than the call's
			return nil, s.errorFor(t.err)
		case ctx.Err() != nil:
			return nil, t.expired(ctx)
		}
		return nil, err
	}
	return t, nil
}

// notBegun takes back what a send has announced, when it is certain that nothing comes of it: a request whose answer was not awaited may
// still become a run.
func (ts *turns) notBegun(s *Session, was bool, err error) {
	var refused *RPCError
	if errors.As(err, &refused) {
		s.mu.Lock()
		ts.busy = was && ts.busy
		s.mu.Unlock()
	}
}

// abandon gives the turn slot up, if t still has it. The turn itself goes on.
func (s *Session) abandon(t *turn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.turns.active == t {
		s.turns.active = nil
	}
	t.disarm()
}

// answer runs on the reader when the server has answered the send: everything before it on the wire has been seen.
func (t *turn) answer(raw json.RawMessage, err error) {
	if err != nil {
		return
	}
	s := t.session
	s.mu.Lock()
	defer s.mu.Unlock()
	t.id, t.answered = unquote(member(raw, "messageId")), true
	t.begin = s.ring.position()
	early := t.early
	t.early = nil
	for i, e := range early {
		if e.event.Type == EventUserMessage && unquote(member(e.event.Data, "messageId")) == t.id {
			for _, e := range early[i:] {
				t.step(&e.event, e.n)
			}
			break
		}
		if e.event.Type == EventSessionError && t.id != "" && unquote(member(e.event.Data, "originatingMessageId")) == t.id {
			t.begin = e.n
			t.step(&e.event, e.n)
		}
	}
	if !t.earlier {
		t.settle()
	}
}

func (t *turn) settle() {
	if !isClosed(t.settled) {
		close(t.settled)
	}
}

func (t *turn) isOver() bool { return isClosed(t.done) }

func (t *turn) bounds() (begin, end uint64) {
	t.session.mu.Lock()
	defer t.session.mu.Unlock()
	return t.begin, t.end
}

// event follows the main agent's events for the session and its turn. n is the event's number.
func (ts *turns) event(e *Event, n uint64) {
	t := ts.active
	if t != nil {
		t.events++
		t.seen, t.seenAt = e.Type, time.Now()
	}
	switch {
	case e.AgentID != "",
		e.Type == EventSessionError && ts.ownError(e.ID),
		e.Type == EventSessionIdle && worksOn(member(e.Data, "backgroundTasks")):
		return
	}
	if t != nil {
		if t.answered {
			t.step(e, n)
		} else {
			t.before(e, n)
		}
	}
	switch e.Type {
	case EventUserMessage, EventAssistantTurnStart:
		ts.busy = true
	case EventSessionIdle:
		ts.busy = false
	}
}

// worksOn reports whether the list in an idle names work that goes on in the background: agents or shells, in one list or a list for each kind.
// Servers of today hold the idle back instead.
func worksOn(raw json.RawMessage) bool {
	var tasks []json.RawMessage
	var kinds map[string][]json.RawMessage
	if json.Unmarshal(raw, &tasks) != nil && json.Unmarshal(raw, &kinds) == nil {
		for _, kind := range kinds {
			tasks = append(tasks, kind...)
		}
	}
	return len(tasks) > 0
}

// ownError reports whether an error event is known to be a Log's.
func (ts *turns) ownError(id string) bool {
	if ts.logged[id] {
		delete(ts.logged, id)
		return true
	}
	if ts.logging > 0 && len(ts.recent) < maxEarly {
		ts.recent = append(ts.recent, id)
	}
	return false
}

// logDone takes the answer to a Log with level error; id is that of its event, which has come or will come, "" when there is none.
func (ts *turns) logDone(id string) {
	own := func(n numbered) bool { return n.event.Type == EventSessionError && n.event.ID == id }
	t := ts.active
	switch {
	case id == "":
	case slices.Contains(ts.recent, id):
		if t != nil {
			t.early, t.held = slices.DeleteFunc(t.early, own), slices.DeleteFunc(t.held, own)
		}
	case len(ts.logged) < maxEarly:
		if ts.logged == nil {
			ts.logged = make(map[string]bool)
		}
		ts.logged[id] = true
	}
	if ts.logging--; ts.logging == 0 {
		ts.recent = nil
	}
	if t == nil {
		return
	}
	held := t.held
	t.held = nil
	for _, e := range held { // holds again what may be another Log's
		t.step(&e.event, e.n)
	}
}

// before keeps what may turn out to be the turn's when the send is answered.
func (t *turn) before(e *Event, n uint64) {
	switch e.Type {
	case EventSessionIdle:
		t.earlier = false // whatever ran before is over
	case EventUserMessage:
		t.earlier = true // unless it turns out to be ours
	}
	switch e.Type {
	case EventSessionIdle, EventUserMessage, EventAssistantMessage, EventSessionError, EventAbort, EventSessionShutdown,
		EventToolExecutionStart, EventToolExecutionComplete, EventPermissionRequested, EventPermissionCompleted:
		if len(t.early) == maxEarly { // the older ones are the likelier to be others'
			t.early = slices.Delete(t.early, 0, maxEarly/2)
		}
		t.early = append(t.early, numbered{*e, n})
	}
}

// step takes one event that came after the send was answered, or after the turn's own user.message.
func (t *turn) step(e *Event, n uint64) {
	if t.isOver() {
		return
	}
	if last := len(t.held) - 1; last >= 0 && e.Type != EventUserMessage {
		if t.held[last].event.Type != EventSessionError {
			return // the turn is over, one way or the other
		}
		switch e.Type {
		case EventAbort, EventSessionShutdown, EventSessionIdle:
			t.held = append(t.held, numbered{*e, n})
			return
		}
	}
	switch e.Type {
	case EventUserMessage:
		switch unquote(member(e.Data, "messageId")) {
		case t.id:
			t.started, t.earlier = true, false
			t.begin, t.last, t.held, t.doubt = n, nil, nil, nil
			t.disarm()
			t.settle()
		default:
			if !t.started {
				t.earlier = true // somebody else's message runs before ours
			}
		}
	case EventAssistantMessage:
		if t.last != nil && t.answeredBy(t.last) && !t.answeredBy(e) {
			break // ours has its answer; this one is to a message queued behind it
		}
		copied := *e
		t.last = &copied
	case EventSessionError:
		t.failed(e, n)
	case EventAbort:
		t.finish(t.session.errorFor(ErrAborted), n+1)
	case EventSessionShutdown:
		t.finish(t.session.errorFor(ErrClosed), n+1)
	case EventSessionIdle:
		switch {
		case t.earlier:
			t.earlier = false // that was the earlier run's
			t.arm()
		case string(member(e.Data, "aborted")) == "true":
			t.finish(t.session.errorFor(ErrAborted), n+1)
		default:
			t.finish(nil, n+1)
		}
	case EventToolExecutionStart:
		if t.tools == nil {
			t.tools = make(map[string]string)
		}
		t.tools[unquote(member(e.Data, "toolCallId"))] = unquote(member(e.Data, "toolName"))
	case EventToolExecutionComplete:
		delete(t.tools, unquote(member(e.Data, "toolCallId")))
	case EventPermissionRequested:
		if t.asks == nil {
			t.asks = make(map[string]bool)
		}
		t.asks[unquote(member(e.Data, "requestId"))] = true
	case EventPermissionCompleted:
		delete(t.asks, unquote(member(e.Data, "requestId")))
	}
}

// answeredBy reports whether an assistant.message says that it answers the turn's message. A run that ours was folded into does not, nor do all servers.
func (t *turn) answeredBy(e *Event) bool {
	return unquote(member(e.Data, "originatingMessageId")) == t.id
}

// failed ends the turn with a final error: not one that the runtime will retry with another model, not another message's. One that may
// be our own Log's waits for that call's answer.
func (t *turn) failed(e *Event, n uint64) {
	ts := &t.session.turns
	origin := unquote(member(e.Data, "originatingMessageId"))
	switch {
	case string(member(e.Data, "eligibleForAutoSwitch")) == "true":
	case origin != "" && origin != t.id:
	case origin == "" && ts.logging > 0:
		if len(t.held) <= ts.logging { // one more than can be a Log's
			t.held = append(t.held, numbered{*e, n})
		}
	case origin == "" && t.earlier: // the earlier run's, unless ours never begins
		t.doubt = t.session.errorFor(newAgentError(e))
		t.arm()
	default:
		t.finish(t.session.errorFor(newAgentError(e)), n+1)
	}
}

func newAgentError(e *Event) *AgentError {
	status, _ := strconv.Atoi(string(member(e.Data, "statusCode")))
	return &AgentError{
		Type:       unquote(member(e.Data, "errorType")),
		Message:    unquote(member(e.Data, "message")),
		StatusCode: status,
		Code:       unquote(member(e.Data, "errorCode")),
		URL:        unquote(member(e.Data, "url")),
	}
}

// finish ends the turn; end is the number after its last event.
func (t *turn) finish(err error, end uint64) {
	if t.isOver() {
		return
	}
	t.err, t.end = err, end
	t.disarm()
	if ts := &t.session.turns; ts.active == t {
		ts.active = nil
	}
	close(t.done)
	t.settle()
}

// over ends the active turn with the session.
func (ts *turns) over(cause error, end uint64) {
	if t := ts.active; t != nil {
		t.finish(t.session.errorFor(cause), end)
	}
}

// arm asks, after a while without the turn's user.message, whether the server is still at work: an idle or error that an earlier run explains may
// have been ours, if our message was dropped from the queue.
func (t *turn) arm() {
	t.disarm()
	t.backstop = time.AfterFunc(settle, t.check) // owned by the turn; check ends within a second
}

func (t *turn) disarm() {
	if t.backstop != nil {
		t.backstop.Stop()
		t.backstop = nil
	}
}

func (t *turn) check() {
	s := t.session
	ctx, cancel := context.WithTimeout(s.ctx, settle)
	defer cancel()
	raw, err := s.call(ctx, "session.metadata.isProcessing", nil, nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	var refused *RPCError // by a server that does not know the question
	switch {
	case t.backstop == nil: // disarmed meanwhile
	case err == nil && string(member(raw, "processing")) == "true",
		err != nil && !errors.As(err, &refused) && t.doubt == nil:
		t.arm()
	default:
		t.finish(t.doubt, s.ring.position())
	}
}

// expired is the error for a wait that ctx has ended.
func (t *turn) expired(ctx context.Context) error {
	s := t.session
	s.mu.Lock()
	defer s.mu.Unlock()
	e := &TurnError{LastEvent: t.seen, Events: t.events, OpenPermissions: len(t.asks), Err: contextError(ctx)}
	if t.seen != "" {
		e.LastEventAge = time.Since(t.seenAt)
	}
	for _, name := range t.tools {
		e.OpenTools = append(e.OpenTools, name)
	}
	slices.Sort(e.OpenTools)
	return s.errorFor(e)
}

// Message is one message of the user. Only Prompt is needed. Printing it shows no header values.
type Message struct {
	// Prompt is the text for the model.
	Prompt string `json:"prompt"`
	// DisplayPrompt is shown to people in place of Prompt.
	DisplayPrompt string `json:"displayPrompt,omitempty"`
	// Attachments go with the prompt. A missing DisplayName is filled in on the way, not here.
	Attachments []Attachment `json:"attachments,omitempty"`
	// Mode says when the message is worked on; "" means Enqueue.
	Mode DeliveryMode `json:"mode,omitempty"`
	// Prepend puts the message at the front of the queue.
	Prepend bool `json:"prepend,omitempty"`
	// Billable false charges no premium request; nil leaves it to the server.
	Billable *bool `json:"billable,omitempty"`
	// RequiredTool makes the server refuse the message where this tool is not available.
	RequiredTool string `json:"requiredTool,omitempty"`
	// AgentMode is the mode for this message; "" means the session's.
	AgentMode AgentMode `json:"agentMode,omitempty"`
	// RequestHeaders are added to the model requests of this turn.
	RequestHeaders map[string]string `json:"requestHeaders,omitempty,secret"`
	// ResponseFormat asks for structured output in this turn; not with Immediate.
	ResponseFormat *ResponseFormat `json:"responseFormat,omitempty"`
	// Traceparent and Tracestate are the W3C trace context; when either is set, [Options.TraceContext] is not asked.
	Traceparent string `json:"traceparent,omitempty"`
	Tracestate  string `json:"tracestate,omitempty"`
}

// DeliveryMode says when a message that meets a running turn is worked on.
type DeliveryMode string

// The delivery modes.
const (
	Enqueue   DeliveryMode = "enqueue"   // after the turn
	Immediate DeliveryMode = "immediate" // folded into the turn at its next tool call, else after it
)

// ResponseFormat asks for an answer that fits a JSON Schema.
type ResponseFormat struct {
	// Name is the format's; "" means "response".
	Name string `json:"name,required"`
	// Schema is the JSON Schema, as anything that encodes as an object; required.
	Schema any `json:"schema,required"`
	// Description tells the model what the answer is for.
	Description string `json:"description,omitempty"`
	// Strict refuses answers that do not fit; nil means true.
	Strict *bool `json:"strict,omitempty"`
}

// sendParams are the params of session.send. Its own members hide the message's.
type sendParams struct {
	SessionID      string            `json:"sessionId"`
	Attachments    []json.RawMessage `json:"attachments,omitempty"`
	ResponseFormat *responseFormat   `json:"responseFormat,omitempty"`
	*Message
}

type responseFormat struct {
	Type       string         `json:"type"`
	JSONSchema ResponseFormat `json:"jsonSchema"`
}

// encode checks m and returns the params of session.send. m is not changed; the result shares nothing with it. Errors match
// ErrInvalidConfig and name the field.
func (m *Message) encode(sessionID string) (json.RawMessage, error) {
	refuse := func(field, format string, args ...any) error {
		return fmt.Errorf("%w: Message.%s: %w", ErrInvalidConfig, field, fmt.Errorf(format, args...))
	}
	switch m.Mode {
	case "", Enqueue, Immediate:
	default: // the server would take it for Enqueue
		return nil, refuse("Mode", "%.64q is unknown", string(m.Mode))
	}
	switch m.AgentMode {
	case "", AgentModeInteractive, AgentModePlan, AgentModeAutopilot, AgentModeShell:
	default:
		return nil, refuse("AgentMode", "%.64q is unknown", string(m.AgentMode))
	}

	msg := *m // shallow: what stands in params as well is taken out
	params := sendParams{SessionID: sessionID, Message: &msg}
	for i, a := range m.Attachments {
		raw, err := a.encode()
		if err != nil {
			return nil, refuse(fmt.Sprintf("Attachments[%d]", i), "%w", err)
		}
		params.Attachments = append(params.Attachments, raw)
	}
	msg.Attachments = nil
	if f := m.ResponseFormat; f != nil {
		if m.Mode == Immediate {
			return nil, refuse("ResponseFormat", "not with Mode %s", Immediate)
		}
		schema, err := plainJSON(f.Schema)
		if err != nil {
			return nil, refuse("ResponseFormat.Schema", "%w", err)
		}
		if schema[0] != '{' {
			return nil, refuse("ResponseFormat.Schema", "not a JSON object")
		}
		params.ResponseFormat = &responseFormat{"json_schema", ResponseFormat{
			Name: cmp.Or(f.Name, "response"), Schema: schema, Description: f.Description, Strict: or(f.Strict, true),
		}}
		msg.ResponseFormat = nil
	}
	if len(m.RequestHeaders) == 0 {
		msg.RequestHeaders = nil
	}
	e := encoder{path: []string{"Message"}}
	return e.encode(params)
}

// attachmentMembers lists the members of an attachment of that kind besides its type, "" for an unknown kind: "path!" must not
// be zero, "text" is always sent, "mimeType?" when it is set. The server stores what it cannot read back, and the session
// is lost with it; so nothing else passes.
func attachmentMembers(kind string) string {
	switch kind {
	case "file":
		return "path! displayName lineRange? mimeType? assetId? byteLength? omittedReason? taggedFilesEntry?"
	case "directory":
		return "path! displayName taggedFilesEntry?"
	case "selection":
		return "filePath! displayName text selection!"
	case "github_reference":
		return "number! title referenceType! state url!"
	case "github_commit":
		return "repo! oid! message url!"
	case "github_release":
		return "repo! tagName! name url!"
	case "github_actions_job":
		return "repo! jobId! jobName workflowName url! conclusion?"
	case "github_repository":
		return "repo! url! description? ref?"
	case "github_file_diff":
		return "url! head? base?"
	case "github_tree_comparison":
		return "url! base! head!"
	case "github_url":
		return "url!"
	case "github_file":
		return "repo! ref! path! url!"
	case "github_snippet":
		return "repo! ref! path! url! lineRange!"
	case "blob":
		return "data! mimeType! displayName assetId? byteLength? omittedReason?"
	case "extension_context":
		return "extensionId! canvasId? instanceId? title payload? capturedAt!"
	}
	return ""
}

// encode checks a and returns its JSON.
func (a Attachment) encode() (json.RawMessage, error) {
	members := strings.Fields(attachmentMembers(string(a.Type)))
	if len(members) == 0 {
		return nil, fmt.Errorf("type %.64q is unknown", string(a.Type))
	}
	if a.DisplayName == "" && slices.Contains(members, "displayName") {
		a.DisplayName = displayName(cmp.Or(a.Path, a.FilePath))
	}
	switch {
	case a.Type == "github_reference" && !slices.Contains([]string{"issue", "pr", "discussion"}, a.ReferenceType):
		return nil, fmt.Errorf(`ReferenceType %.64q is none of "issue", "pr", "discussion"`, a.ReferenceType)
	case a.Type == "github_file_diff" && (!isFileSide(a.Head) || !isFileSide(a.Base)):
		return nil, errors.New("a side of a github_file_diff is a Ref and a Path")
	case a.Type == "github_tree_comparison" && (!isTreeSide(a.Head) || !isTreeSide(a.Base)):
		return nil, errors.New("a side of a github_tree_comparison is a Revision")
	case a.Type == "blob":
		data, err := base64.StdEncoding.DecodeString(a.Data)
		if err != nil || strings.ContainsAny(a.Data, "\r\n") { // which the decoder skips
			return nil, errors.New("Data is not standard base64")
		}
		if !looksLike(a.MIMEType, data) {
			return nil, fmt.Errorf("Data is no image of type %.64q", a.MIMEType)
		}
	}

	var e encoder
	v := reflect.ValueOf(a)
	e.buf.WriteString(`{"type":` + strconv.Quote(string(a.Type)))
	for i := range v.NumField() {
		f, fv := v.Type().Field(i), v.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		unset := fv.IsZero()
		switch {
		case name == "type":
			continue
		case slices.Contains(members, name+"!") && unset:
			return nil, fmt.Errorf("%s of a %s is missing", f.Name, a.Type)
		case slices.Contains(members, name+"!"), slices.Contains(members, name):
		case unset:
			continue
		case !slices.Contains(members, name+"?"):
			return nil, fmt.Errorf("a %s has no %s", a.Type, f.Name)
		}
		e.comma('{')
		e.buf.WriteString(strconv.Quote(name) + ":")
		if err := e.value(fv, false); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	e.buf.WriteByte('}')
	return e.buf.Bytes(), nil
}

func isFileSide(r *GitHubRevision) bool {
	return r == nil || r.Ref != "" && r.Path != "" && r.Revision == ""
}

func isTreeSide(r *GitHubRevision) bool {
	return r == nil || r.Ref == "" && r.Path == "" && r.Revision != ""
}

// displayName returns the last element of path, written for any system; path where there is none; "attachment" for "".
func displayName(path string) string {
	trimmed := strings.TrimRight(path, `/\`)
	return cmp.Or(trimmed[strings.LastIndexAny(trimmed, `/\`)+1:], path, "attachment")
}

// looksLike reports whether data may be of the MIME type. It knows the usual images only: the server cannot load a session
// again in which one of these is something else.
func looksLike(mimeType string, data []byte) bool {
	switch mimeType {
	case "image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp":
		return strings.HasPrefix(http.DetectContentType(data), "image/")
	}
	return true
}

// ask makes a call whose result is a T. An absent, null or empty result is the zero T.
func ask[T any](ctx context.Context, call func(ctx context.Context, method string, params, result any) error, method string, params any) (T, error) {
	var result, none T
	if err := call(ctx, method, params, &result); err != nil {
		return none, err
	}
	return result, nil
}

// outcome is a result that may say, in its body, that nothing was done.
type outcome struct {
	Success *bool  `json:"success"`
	Error   string `json:"error"`
}

func (o outcome) refusal(c *Client, method, sessionID string) error {
	if o.Success == nil || *o.Success {
		return nil
	}
	return c.refused(method, o.Error, sessionID)
}

// idParams are the params of the client's calls about one session.
type idParams struct {
	SessionID string `json:"sessionId"`
}

// onSession makes a call about the session with this id, which need not be open here.
func onSession[T any](ctx context.Context, c *Client, method, id string) (T, error) {
	r, err := ask[T](ctx, c.Call, method, idParams{id})
	if err != nil {
		err = &SessionError{SessionID: id, Err: err}
	}
	return r, err
}

// PingResult is the server's answer to a ping.
type PingResult struct {
	Message         string    `json:"message"`
	Timestamp       time.Time `json:"timestamp"` // the server's clock
	ProtocolVersion int       `json:"protocolVersion"`
}

// Ping asks the server for a sign of life. The answer quotes message.
//
// Experimental: the server's schema marks it so.
func (c *Client) Ping(ctx context.Context, message string) (PingResult, error) {
	return ask[PingResult](ctx, c.Call, "ping", struct {
		Message string `json:"message,omitempty"`
	}{message})
}

// Status is what the server runs.
type Status struct {
	Version         string `json:"version"` // of the CLI
	ProtocolVersion int    `json:"protocolVersion"`
}

// Status returns the versions of the CLI and of its protocol.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return ask[Status](ctx, c.Call, "status.get", nil)
}

// AuthStatus says who is logged in.
type AuthStatus struct {
	IsAuthenticated bool   `json:"isAuthenticated"`
	AuthType        string `json:"authType"` // user, env, gh-cli, hmac, api-key, token
	Host            string `json:"host"`
	Login           string `json:"login"`
	StatusMessage   string `json:"statusMessage"` // for people
}

// Err returns nil when the CLI is logged in, else an error that matches ErrAuthentication and carries the server's words.
func (a AuthStatus) Err() error {
	if a.IsAuthenticated {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrAuthentication, cmp.Or(a.StatusMessage, "nobody is logged in"))
}

// AuthStatus returns whether the CLI is logged in, and how.
func (c *Client) AuthStatus(ctx context.Context) (AuthStatus, error) {
	return ask[AuthStatus](ctx, c.Call, "auth.getStatus", nil)
}

// Model is a language model that sessions can use.
type Model struct {
	ID                        string            `json:"id"`
	Name                      string            `json:"name"`
	Capabilities              ModelCapabilities `json:"capabilities"`
	Policy                    *ModelPolicy      `json:"policy,omitempty"`
	Billing                   *ModelBilling     `json:"billing,omitempty"`
	SupportedReasoningEfforts []string          `json:"supportedReasoningEfforts,omitempty"`
	DefaultReasoningEffort    string            `json:"defaultReasoningEffort,omitempty"`
	SupportedContextTiers     []string          `json:"supportedContextTiers,omitempty"`
	ModelPickerCategory       string            `json:"modelPickerCategory,omitempty"`      // lightweight, versatile, powerful
	ModelPickerPriceCategory  string            `json:"modelPickerPriceCategory,omitempty"` // low, medium, high, very_high
	Metadata                  json.RawMessage   `json:"metadata,omitempty"`
	WarningText               json.RawMessage   `json:"warningText,omitempty"`
	InfoMessages              []ModelMessage    `json:"infoMessages,omitempty"`
	WarningMessages           []ModelMessage    `json:"warningMessages,omitempty"`
	Provider                  *ModelProvider    `json:"provider,omitempty"`
}

// ModelPolicy is what the user's organisation says about a model.
type ModelPolicy struct {
	State string `json:"state"` // enabled, disabled, unconfigured
	Terms string `json:"terms,omitempty"`
}

// ModelBilling is what a model costs.
type ModelBilling struct {
	Multiplier      float64         `json:"multiplier,omitempty"` // premium requests for each request
	TokenPrices     json.RawMessage `json:"tokenPrices,omitempty"`
	DiscountPercent int             `json:"discountPercent,omitempty"`
	Promo           json.RawMessage `json:"promo,omitempty"`
}

// ModelMessage is a notice about a model, for people.
type ModelMessage struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// ModelProvider says where a model comes from.
type ModelProvider struct {
	ID    string `json:"id"`
	Label string `json:"label"`
	Kind  string `json:"kind"`
}

// models is a client's list of models.
type models struct {
	mu   sync.Mutex
	list json.RawMessage // as JSON, of which every caller decodes a copy of its own; nil before the first success
	load *modelLoad      // in flight
}

type modelLoad struct {
	waiting int // guarded by models.mu
	cancel  context.CancelFunc
	done    chan struct{}
	list    json.RawMessage // valid after done, like err
	err     error
}

// Models returns the models that the user may choose from, or what Options.ListModels returns. The first success is kept for the life of the
// client; errors are not. Concurrent calls share one request, which lasts as long as any of them waits for it. The list belongs to
// the caller; Capabilities.Supports and Capabilities.Limits in it are never nil. Errors match ErrAuthentication when nobody is logged in.
//
// Experimental: the server's schema marks it so.
func (c *Client) Models(ctx context.Context) ([]Model, error) {
	list, err := c.modelList(ctx)
	if err != nil {
		return nil, err
	}
	return decodeModels(list)
}

func decodeModels(list json.RawMessage) ([]Model, error) {
	var found []Model
	if err := decodeResult("models.list", list, &found); err != nil {
		return nil, err
	}
	for i := range found {
		capabilities := &found[i].Capabilities
		capabilities.Supports = or(capabilities.Supports, ModelSupports{})
		capabilities.Limits = or(capabilities.Limits, ModelLimits{})
	}
	return found, nil
}

func (c *Client) modelList(ctx context.Context) (json.RawMessage, error) {
	if ctx.Err() != nil {
		return nil, contextError(ctx)
	}
	if err := c.conn.failure(); err != nil {
		return nil, err
	}
	m := &c.models
	m.mu.Lock()
	if m.list != nil {
		defer m.mu.Unlock()
		return m.list, nil
	}
	load := m.load
	if load == nil {
		load = &modelLoad{done: make(chan struct{})}
		var loading context.Context
		loading, load.cancel = context.WithCancel(c.ctx)
		m.load = load
		go c.loadModels(loading, load) // owned by the client; ends with the answer, with its last caller or with the client
	}
	load.waiting++
	m.mu.Unlock()
	select {
	case <-load.done:
	case <-ctx.Done():
		m.leave(load)
		return nil, contextError(ctx)
	case <-c.ctx.Done(): // a ListModels that does not return is left to itself
	}
	if c.ctx.Err() != nil {
		return nil, context.Cause(c.ctx)
	}
	return load.list, load.err
}

// leave gives up waiting for a load; the last one ends it.
func (m *models) leave(load *modelLoad) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if load.waiting--; load.waiting == 0 {
		load.cancel()
		if m.load == load {
			m.load = nil
		}
	}
}

func (c *Client) loadModels(ctx context.Context, load *modelLoad) {
	defer load.cancel()
	protect(c, func() (json.RawMessage, error) { return c.fetchModels(ctx) }, func(list json.RawMessage, err error) {
		c.models.mu.Lock()
		defer c.models.mu.Unlock()
		load.list, load.err = list, err
		if c.models.load == load {
			c.models.list, c.models.load = list, nil
		}
		close(load.done)
	})
}

func (c *Client) fetchModels(ctx context.Context) (list json.RawMessage, err error) {
	if c.opts.ListModels != nil {
		found, err := c.opts.ListModels(ctx)
		if err == nil {
			list, err = marshal(found)
		}
		if err != nil {
			return nil, fmt.Errorf("copilot: ListModels: %w", err)
		}
		return list, nil
	}
	result, err := ask[struct {
		Models json.RawMessage `json:"models"`
	}](ctx, c.Call, "models.list", nil)
	if err != nil {
		return nil, err
	}
	if _, err := decodeModels(result.Models); err != nil {
		return nil, err
	}
	return append(json.RawMessage{}, result.Models...), nil
}

// Quota is what is left of the user's quotas.
type Quota struct {
	QuotaSnapshots map[string]QuotaSnapshot `json:"quotaSnapshots"` // by kind: chat, completions, premium_interactions, ...
}

// Quota returns what is left of the user's quotas. Errors match ErrAuthentication when nobody is logged in.
//
// Experimental: the server's schema marks it so.
func (c *Client) Quota(ctx context.Context) (Quota, error) {
	return ask[Quota](ctx, c.Call, "account.getQuota", nil)
}

// SessionFilter selects sessions by their working directory. Each member that is set must match exactly.
type SessionFilter struct {
	CWD        string `json:"cwd,omitempty"`
	GitRoot    string `json:"gitRoot,omitempty"`
	Repository string `json:"repository,omitempty"` // owner/name
	Branch     string `json:"branch,omitempty"`
}

// SessionInfo describes a stored session.
type SessionInfo struct {
	SessionID    string                   `json:"sessionId"`
	StartTime    time.Time                `json:"startTime"`
	ModifiedTime time.Time                `json:"modifiedTime"`
	Summary      string                   `json:"summary"`
	Name         string                   `json:"name"`
	ClientName   string                   `json:"clientName"` // of the client that used it last
	IsRemote     bool                     `json:"isRemote"`
	IsDetached   bool                     `json:"isDetached"` // for maintenance, not for people
	Context      *WorkingDirectoryContext `json:"context"`

	// Of remote sessions only.
	Repository        *RemoteRepository `json:"repository"`
	RemoteSessionIDs  []string          `json:"remoteSessionIds"` // newest first
	PullRequestNumber int               `json:"pullRequestNumber"`
	ResourceID        string            `json:"resourceId"`
	TaskType          string            `json:"taskType"` // cca, cli
	State             string            `json:"state"`
}

// Sessions lists the stored sessions that filter selects, all for nil. A session is stored from its first message on.
func (c *Client) Sessions(ctx context.Context, filter *SessionFilter) ([]SessionInfo, error) {
	r, err := ask[struct {
		Sessions []SessionInfo `json:"sessions"`
	}](ctx, c.Call, "session.list", struct {
		Filter *SessionFilter `json:"filter,omitempty"`
	}{filter})
	return r.Sessions, err
}

// SessionInfo describes the stored session with this id; it returns nil, nil when there is none.
func (c *Client) SessionInfo(ctx context.Context, id string) (*SessionInfo, error) {
	r, err := onSession[struct {
		Session *SessionInfo `json:"session"`
	}](ctx, c, "session.getMetadata", id)
	return r.Session, err
}

// LastSessionID returns the id of the stored session that was changed last, "" when there is none.
func (c *Client) LastSessionID(ctx context.Context) (string, error) {
	r, err := ask[idParams](ctx, c.Call, "session.getLastId", nil)
	return r.SessionID, err
}

// ForegroundSessionID returns the id of the session that the CLI's terminal interface shows, "" when it shows none or has no such interface.
func (c *Client) ForegroundSessionID(ctx context.Context) (string, error) {
	r, err := ask[idParams](ctx, c.Call, "session.getForeground", nil)
	return r.SessionID, err
}

// SetForegroundSessionID makes the CLI's terminal interface show a session. A CLI without one refuses, with an [*RPCError].
func (c *Client) SetForegroundSessionID(ctx context.Context, id string) error {
	return c.ensure(ctx, "session.setForeground", id)
}

// DeleteSession deletes a session and its files. One that is open here ends with ErrSessionNotFound. Where there is none, the
// error matches ErrSessionNotFound.
func (c *Client) DeleteSession(ctx context.Context, id string) error {
	c.mu.Lock()
	s := c.routes[id].session
	if s != nil && s.phase == starting {
		s = nil // it is about to exist again
	}
	c.mu.Unlock()
	err := c.ensure(ctx, "session.delete", id)
	if err == nil && s != nil {
		s.end(s.errorFor(ErrSessionNotFound))
	}
	return err
}

// ensure makes a call about a session whose result says whether it was done.
func (c *Client) ensure(ctx context.Context, method, id string) error {
	r, err := onSession[outcome](ctx, c, method, id)
	if err != nil {
		return err
	}
	return r.refusal(c, method, id)
}

// ForkSession copies a stored session, up to and without the event beforeEventID, whole when that is "". It returns the id of the copy, which
// can be resumed.
//
// Experimental: the server's schema marks it so.
func (c *Client) ForkSession(ctx context.Context, id, beforeEventID string) (string, error) {
	r, err := ask[idParams](ctx, c.Call, "sessions.fork", struct {
		SessionID string `json:"sessionId"`
		ToEventID string `json:"toEventId,omitempty"`
	}{id, beforeEventID})
	if err != nil {
		err = &SessionError{SessionID: id, Err: err}
	}
	return r.SessionID, err
}

// TelemetryEvent is an event of the host's for the CLI's telemetry.
type TelemetryEvent struct {
	Kind       string             `json:"kind"`
	Properties map[string]string  `json:"properties,omitempty"`
	Metrics    map[string]float64 `json:"metrics,omitempty"`
	ClientName string             `json:"clientName,omitempty"` // of the host, for [Client.SendTelemetry] only; "" means sdk
}

// SendTelemetry hands the CLI an event that belongs to no session.
//
// Experimental: no schema of the server's has it.
func (c *Client) SendTelemetry(ctx context.Context, t TelemetryEvent) error {
	if t.ClientName == "" {
		t.ClientName = "sdk"
	}
	return c.Call(ctx, "sendTelemetry", t, nil)
}

// SendTelemetry hands the CLI an event of this session.
//
// Experimental: no schema of the server's has it.
func (s *Session) SendTelemetry(ctx context.Context, t TelemetryEvent) error {
	t.ClientName = ""
	return s.Call(ctx, "session.sendTelemetry", t, nil)
}

// Capabilities is what the clients of a session can do for it.
type Capabilities struct {
	UI         UICapabilities `json:"ui"`
	Extensions bool           `json:"extensions"`
}

// UICapabilities is what the user interfaces of a session's clients can show.
type UICapabilities struct {
	Elicitation bool `json:"elicitation"` // forms: [Session.UI] works
	MCPApps     bool `json:"mcpApps"`
	Canvases    bool `json:"canvases"`
}

// merge changes what raw names and leaves the rest, as well as what does not fit.
func (c *Capabilities) merge(raw json.RawMessage) { _ = json.Unmarshal(raw, c) }

// Capabilities returns what the session's clients can do at present.
func (s *Session) Capabilities() Capabilities {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.capabilities
}

// OpenCanvases returns the canvases that are open at present, in the order in which they were opened. The list belongs to the caller.
func (s *Session) OpenCanvases() []OpenCanvas {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := slices.Clone(s.canvases)
	for i := range list {
		list[i].Input = bytes.Clone(list[i].Input)
	}
	return list
}

func (s *Session) putCanvasLocked(canvas OpenCanvas) {
	switch i := s.canvasLocked(canvas.InstanceID); {
	case canvas.InstanceID == "":
	case i >= 0:
		s.canvases[i] = canvas
	default:
		s.canvases = append(s.canvases, canvas)
	}
}

func (s *Session) dropCanvasLocked(id string) {
	if i := s.canvasLocked(id); i >= 0 {
		s.canvases = slices.Delete(s.canvases, i, i+1)
	}
}

func (s *Session) canvasLocked(id string) int {
	return slices.IndexFunc(s.canvases, func(c OpenCanvas) bool { return c.InstanceID == id })
}

// CurrentModel is the model that a session uses.
type CurrentModel struct {
	ModelID         string `json:"modelId"`
	ReasoningEffort string `json:"reasoningEffort"`
	ContextTier     string `json:"contextTier"` // default, long_context
	AutoTier        string `json:"autoTier"`    // efficiency, balance, intelligence, fast
}

// Model returns the model that the session uses.
//
// Experimental: the server's schema marks it so.
func (s *Session) Model(ctx context.Context) (CurrentModel, error) {
	return ask[CurrentModel](ctx, s.Call, "session.model.getCurrent", nil)
}

// ModelOptions tunes a change of model. Members that are not set keep what the session has.
type ModelOptions struct {
	ReasoningEffort      string             `json:"reasoningEffort,omitempty"`
	ResetReasoningEffort bool               `json:"-"`                          // go back to the model's default
	ReasoningSummary     string             `json:"reasoningSummary,omitempty"` // none, concise, detailed
	ContextTier          string             `json:"contextTier,omitempty"`      // default, long_context
	AutoTier             string             `json:"autoTier,omitempty"`         // efficiency, balance, intelligence, fast; with model auto only
	ModelCapabilities    *ModelCapabilities `json:"modelCapabilities,omitempty"`
}

// SetModel changes the session's model, at once or, while a turn runs, after that; the event session.model_change tells when.
//
// Experimental: the server's schema marks it so.
func (s *Session) SetModel(ctx context.Context, model string, o *ModelOptions) error {
	o = or(o, ModelOptions{})
	params := struct {
		ModelID         string          `json:"modelId"`
		ReasoningEffort json.RawMessage `json:"reasoningEffort,omitempty"` // hides that of the options
		*ModelOptions
	}{ModelID: model, ModelOptions: o}
	switch {
	case o.ResetReasoningEffort && o.ReasoningEffort != "":
		return s.errorFor(fmt.Errorf("%w: ModelOptions: ReasoningEffort with ResetReasoningEffort", ErrInvalidConfig))
	case o.ResetReasoningEffort:
		params.ReasoningEffort = json.RawMessage("null")
	case o.ReasoningEffort != "":
		params.ReasoningEffort = appendQuoted(nil, o.ReasoningEffort)
	}
	return s.Call(ctx, "session.model.switchTo", params, nil)
}

// Mode returns how far the agent goes by itself.
//
// Experimental: the server's schema marks it so.
func (s *Session) Mode(ctx context.Context) (AgentMode, error) {
	raw, err := ask[json.RawMessage](ctx, s.Call, "session.mode.get", nil)
	if err != nil || len(raw) == 0 || raw[0] == '{' { // an empty result
		return "", err
	}
	var mode AgentMode
	if err := decodeResult("session.mode.get", raw, &mode); err != nil {
		return "", s.errorFor(err)
	}
	return mode, nil
}

// SetMode changes how far the agent goes by itself: AgentModeInteractive, AgentModePlan or AgentModeAutopilot.
//
// Experimental: the server's schema marks it so.
func (s *Session) SetMode(ctx context.Context, mode AgentMode) error {
	return s.Call(ctx, "session.mode.set", map[string]AgentMode{"mode": mode}, nil)
}

// Name returns the session's name, "" when it has none.
//
// Experimental: the server's schema marks it so.
func (s *Session) Name(ctx context.Context) (string, error) {
	r, err := ask[struct {
		Name string `json:"name"`
	}](ctx, s.Call, "session.name.get", nil)
	return r.Name, err
}

// SetName names the session. The server refuses an empty name.
//
// Experimental: the server's schema marks it so.
func (s *Session) SetName(ctx context.Context, name string) error {
	return s.Call(ctx, "session.name.set", map[string]string{"name": name}, nil)
}

// Plan is a session's plan.
type Plan struct {
	Exists  bool   `json:"exists"`
	Content string `json:"content"`
	Path    string `json:"path"` // of its file, also where there is none yet
}

// ReadPlan returns the session's plan.
//
// Experimental: the server's schema marks it so.
func (s *Session) ReadPlan(ctx context.Context) (Plan, error) {
	return ask[Plan](ctx, s.Call, "session.plan.read", nil)
}

// UpdatePlan writes the session's plan.
//
// Experimental: the server's schema marks it so.
func (s *Session) UpdatePlan(ctx context.Context, content string) error {
	return s.Call(ctx, "session.plan.update", map[string]string{"content": content}, nil)
}

// DeletePlan deletes the session's plan.
//
// Experimental: the server's schema marks it so.
func (s *Session) DeletePlan(ctx context.Context) error {
	return s.Call(ctx, "session.plan.delete", nil, nil)
}

// WorkspaceFiles lists the files of the session's workspace, by their paths in it.
//
// Experimental: the server's schema marks it so.
func (s *Session) WorkspaceFiles(ctx context.Context) ([]string, error) {
	r, err := ask[struct {
		Files []string `json:"files"`
	}](ctx, s.Call, "session.workspaces.listFiles", nil)
	return r.Files, err
}

// ReadWorkspaceFile returns the content of a file of the session's workspace. path is as in [Session.WorkspaceFiles].
//
// Experimental: the server's schema marks it so.
func (s *Session) ReadWorkspaceFile(ctx context.Context, path string) (string, error) {
	r, err := ask[struct {
		Content string `json:"content"`
	}](ctx, s.Call, "session.workspaces.readFile", map[string]string{"path": path})
	return r.Content, err
}

// CreateWorkspaceFile writes a file of the session's workspace, and makes the directories above it. A file that is there is replaced.
//
// Experimental: the server's schema marks it so.
func (s *Session) CreateWorkspaceFile(ctx context.Context, path, content string) error {
	return s.Call(ctx, "session.workspaces.createFile", map[string]string{"path": path, "content": content}, nil)
}

// AnswerToolCall answers a tool call that no handler has answered: one that was pending when the session was resumed with
// [SessionConfig.ContinuePendingWork], or whose tool is only declared here. requestID is that of the [ToolCall] or of the event
// external_tool.requested. Where the call is not pending any more, the server refuses, with an [*RPCError].
//
// Experimental: the server's schema marks it so.
func (s *Session) AnswerToolCall(ctx context.Context, requestID string, r ToolResult) error {
	r, err := r.checked(nil)
	if err != nil {
		return s.errorFor(fmt.Errorf("%w: %w", ErrInvalidConfig, err))
	}
	return s.answerPending(ctx, methodToolAnswer, map[string]any{"requestId": requestID, "result": r})
}

// AnswerPermission answers a permission request that no handler has answered: one that was pending when the session was resumed with
// [SessionConfig.ContinuePendingWork], or for which OnPermission returned [NoResult]. requestID is that of the [PermissionRequest] or of the
// event permission.requested. Where the request is not pending any more, the server refuses, with an [*RPCError]. A decision that is
// zero, incomplete or NoResult is ErrInvalidConfig.
//
// Experimental: the server's schema marks it so.
func (s *Session) AnswerPermission(ctx context.Context, requestID string, d PermissionDecision) error {
	params := map[string]any{"requestId": requestID, "result": d}
	if d.context != nil {
		params["decisionContext"] = d.context
	}
	return s.answerPending(ctx, methodPermissionAnswer, params)
}

func (s *Session) answerPending(ctx context.Context, method string, params any) error {
	r, err := ask[outcome](ctx, s.Call, method, params)
	if err != nil {
		return err
	}
	return r.refusal(s.client, method, s.id)
}

// StartFleet sends a prompt, "" for none, that a fleet of agents works on in parallel, and returns without waiting for them. A server that
// does not start it refuses, with an [*RPCError].
//
// Experimental: the server's schema marks it so.
func (s *Session) StartFleet(ctx context.Context, prompt string) error {
	r, err := ask[struct {
		Started *bool `json:"started"`
	}](ctx, s.Call, "session.fleet.start", struct {
		Prompt string `json:"prompt,omitempty"`
	}{prompt})
	if err == nil && r.Started != nil && !*r.Started {
		err = s.client.refused("session.fleet.start", "not started", s.id)
	}
	return err
}

// Compaction is what a compaction has done.
type Compaction struct {
	Success         bool           `json:"success"`
	TokensRemoved   int64          `json:"tokensRemoved"`
	MessagesRemoved int64          `json:"messagesRemoved"`
	SummaryContent  string         `json:"summaryContent"`
	ContextWindow   *ContextWindow `json:"contextWindow"`
}

// ContextWindow is how full a model's context window is, in tokens.
type ContextWindow struct {
	TokenLimit            int64 `json:"tokenLimit"`
	CurrentTokens         int64 `json:"currentTokens"`
	MessagesLength        int64 `json:"messagesLength"` // messages
	SystemTokens          int64 `json:"systemTokens"`
	ConversationTokens    int64 `json:"conversationTokens"`
	ToolDefinitionsTokens int64 `json:"toolDefinitionsTokens"`
}

// Compact replaces the conversation so far by a summary, at the cost of a call of the model. The server refuses when there is nothing to
// compact.
//
// Experimental: the server's schema marks it so.
func (s *Session) Compact(ctx context.Context) (Compaction, error) {
	return ask[Compaction](ctx, s.Call, "session.history.compact", nil)
}

// LogLevel is how grave a log entry is.
type LogLevel string

// The log levels.
const (
	LogInfo    LogLevel = "info"
	LogWarning LogLevel = "warning"
	LogError   LogLevel = "error"
)

// LogOptions describes a log entry.
type LogOptions struct {
	Level     LogLevel `json:"level,omitempty"`     // "" means LogInfo
	Type      string   `json:"type,omitempty"`      // what it is about; "" means notification
	Ephemeral bool     `json:"ephemeral,omitempty"` // not stored
	URL       string   `json:"url,omitempty"`       // a page that helps
	Tip       string   `json:"tip,omitempty"`       // what to do; with LogInfo only
}

// Log adds an entry of the host's to the session: an event session.info, session.warning or session.error. The last one ends no turn
// that is waited for here; other clients may take it for a failure.
//
// Experimental: the server's schema marks it so.
func (s *Session) Log(ctx context.Context, message string, o *LogOptions) error {
	o = or(o, LogOptions{})
	var then func(json.RawMessage, error)
	switch o.Level {
	case "", LogInfo, LogWarning:
	case LogError:
		then = s.logged
		s.mu.Lock()
		s.turns.logging++
		s.mu.Unlock()
	default:
		return s.errorFor(fmt.Errorf("%w: LogOptions.Level: %.64q is unknown", ErrInvalidConfig, string(o.Level)))
	}
	_, err := s.call(ctx, "session.log", struct {
		Message string `json:"message"`
		*LogOptions
	}{message, o}, then)
	return err
}

// logged runs, on the reader, when a Log with level error is over.
func (s *Session) logged(raw json.RawMessage, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turns.logDone(unquote(member(raw, "eventId")))
}

// UI asks the users of the session's clients, one of which may be this one: what it is asked, SessionConfig.OnElicitation answers. Its methods
// wait, as long as ctx lasts, for somebody to answer. They return ErrNotSupported, and send nothing, while no client can show forms.
type UI struct{ session *Session }

// UI returns the access to the session's users.
func (s *Session) UI() UI { return UI{s} }

// Elicit shows a form and returns what became of it. schema is a JSON Schema object whose properties are the form's fields: flat, of type string,
// number, integer, boolean, or array of choices. The content is not checked against it, here or by the server.
//
// Experimental: the server's schema marks it so.
func (u UI) Elicit(ctx context.Context, message string, schema any) (ElicitationResult, error) {
	return elicit[ElicitationResult](ctx, u, message, schema)
}

func elicit[T any](ctx context.Context, u UI, message string, schema any) (result T, err error) {
	if err = u.session.failure(); err == nil && !u.session.Capabilities().UI.Elicitation {
		err = fmt.Errorf("%w: no client of the session can show forms", ErrNotSupported)
	}
	if err != nil {
		return result, u.session.errorFor(err)
	}
	return ask[T](ctx, u.session.Call, "session.ui.elicitation", struct {
		Message         string `json:"message"`
		RequestedSchema any    `json:"requestedSchema"`
	}{message, schema})
}

// field shows a form with one required field and returns its raw value, nil unless the form was accepted.
func (u UI) field(ctx context.Context, message, name string, schema any) (json.RawMessage, error) {
	r, err := elicit[struct {
		Action  string                     `json:"action"`
		Content map[string]json.RawMessage `json:"content"`
	}](ctx, u, message, struct {
		Type       string         `json:"type"`
		Properties map[string]any `json:"properties"`
		Required   []string       `json:"required"`
	}{"object", map[string]any{name: schema}, []string{name}})
	if err != nil || r.Action != "accept" {
		return nil, err
	}
	return r.Content[name], nil
}

// text is field for a string. ok is false for a form that was not accepted, or accepted with something else.
func (u UI) text(ctx context.Context, message, name string, schema any) (value string, ok bool, err error) {
	raw, err := u.field(ctx, message, name, schema)
	if err != nil || len(raw) == 0 || raw[0] != '"' {
		return "", false, err
	}
	return unquote(raw), true, nil
}

// Confirm asks a yes-or-no question. It returns true for an explicit yes only.
//
// Experimental: the server's schema marks it so.
func (u UI) Confirm(ctx context.Context, message string) (bool, error) {
	raw, err := u.field(ctx, message, "confirmed", struct {
		Type    string `json:"type"`
		Default bool   `json:"default"`
	}{"boolean", true})
	return string(raw) == "true", err
}

// Select asks for one of several options. ok is false when the user chose none.
//
// Experimental: the server's schema marks it so.
func (u UI) Select(ctx context.Context, message string, options []string) (choice string, ok bool, err error) {
	if len(options) == 0 {
		return "", false, u.session.errorFor(fmt.Errorf("%w: Select without options", ErrInvalidConfig))
	}
	choice, ok, err = u.text(ctx, message, "selection", struct {
		Type string   `json:"type"`
		Enum []string `json:"enum"`
	}{"string", options})
	if ok && !slices.Contains(options, choice) {
		return "", false, u.session.errorFor(errors.New("copilot: session.ui.elicitation: the answer is none of the options"))
	}
	return choice, ok, err
}

// InputOptions describes the field of an [UI.Input]. Members that are not set do not limit it.
type InputOptions struct {
	Title       string `json:"title,omitempty"`
	Description string `json:"description,omitempty"`
	MinLength   int    `json:"minLength,omitempty"` // characters, like MaxLength
	MaxLength   int    `json:"maxLength,omitempty"`
	Format      string `json:"format,omitempty"` // email, uri, date, date-time
	Default     string `json:"default,omitempty"`
}

// Input asks for a line of text. ok is false when the user gave none. What was given is not checked against o, here or by the server.
//
// Experimental: the server's schema marks it so.
func (u UI) Input(ctx context.Context, message string, o *InputOptions) (value string, ok bool, err error) {
	return u.text(ctx, message, "value", struct {
		Type string `json:"type"`
		*InputOptions
	}{"string", o})
}

// AgentInfo describes an agent that a session can be handed to.
type AgentInfo struct {
	ID                     string    `json:"id"`
	Name                   string    `json:"name"`
	DisplayName            string    `json:"displayName"`
	Description            string    `json:"description"`
	Path                   string    `json:"path"`   // of its file, "" when it has none
	Source                 string    `json:"source"` // user, project, inherited, remote, plugin, builtin
	UserInvocable          *bool     `json:"userInvocable"`
	DisableModelInvocation bool      `json:"disableModelInvocation"`
	Tools                  *[]string `json:"tools"` // nil means the default ones
	Model                  string    `json:"model"`
	ReasoningEffort        string    `json:"reasoningEffort"`
	Skills                 []string  `json:"skills"`
}

// Agents lists the session's custom agents.
//
// Experimental: the server's schema marks it so.
func (s *Session) Agents(ctx context.Context) ([]AgentInfo, error) {
	r, err := ask[struct {
		Agents []AgentInfo `json:"agents"`
	}](ctx, s.Call, "session.agent.list", nil)
	return r.Agents, err
}

// Agent returns the custom agent that the session is handed to, nil when there is none.
//
// Experimental: the server's schema marks it so.
func (s *Session) Agent(ctx context.Context) (*AgentInfo, error) {
	r, err := ask[struct {
		Agent *AgentInfo `json:"agent"`
	}](ctx, s.Call, "session.agent.getCurrent", nil)
	return r.Agent, err
}

// SelectAgent hands the session to one of its custom agents, "" takes it back.
//
// Experimental: the server's schema marks it so.
func (s *Session) SelectAgent(ctx context.Context, name string) error {
	if name == "" {
		return s.Call(ctx, "session.agent.deselect", nil, nil)
	}
	return s.Call(ctx, "session.agent.select", map[string]string{"name": name}, nil)
}

// Skills lists the session's skills.
//
// Experimental: the server's schema marks it so.
func (s *Session) Skills(ctx context.Context) ([]LoadedSkill, error) {
	r, err := ask[struct {
		Skills []LoadedSkill `json:"skills"`
	}](ctx, s.Call, "session.skills.list", nil)
	return r.Skills, err
}

// MCPServers lists the session's MCP servers and how they are.
//
// Experimental: the server's schema marks it so.
func (s *Session) MCPServers(ctx context.Context) ([]LoadedMCPServer, error) {
	r, err := ask[struct {
		Servers []LoadedMCPServer `json:"servers"`
	}](ctx, s.Call, "session.mcp.list", nil)
	return r.Servers, err
}

// ToolInfo describes a tool that the model can call.
type ToolInfo struct {
	Name           string          `json:"name"`
	NamespacedName string          `json:"namespacedName"`
	MCPServerName  string          `json:"mcpServerName"` // "" for tools of other origin, like MCPToolName
	MCPToolName    string          `json:"mcpToolName"`
	Description    string          `json:"description"`
	InputSchema    json.RawMessage `json:"input_schema"`
	DeferLoading   bool            `json:"deferLoading"` // found by tool search only
}

// Tools lists the tools that the model can call. The server makes the list with a message: before the first one, and after a change such as
// another model until the next, it is empty.
//
// Experimental: the server's schema marks it so.
func (s *Session) Tools(ctx context.Context) ([]ToolInfo, error) {
	r, err := ask[struct {
		Tools []ToolInfo `json:"tools"`
	}](ctx, s.Call, "session.tools.getCurrentMetadata", nil)
	return r.Tools, err
}

// TaskInfo describes work in the background: an agent, a shell command, or a task of a client.
type TaskInfo struct {
	Type           string     `json:"type"` // agent, shell, client
	ID             string     `json:"id"`
	DisplayName    string     `json:"displayName"`
	Description    string     `json:"description"`
	Status         string     `json:"status"` // running, idle, completed, failed, cancelled; of clients also orphaned
	StartedAt      time.Time  `json:"startedAt"`
	CompletedAt    *time.Time `json:"completedAt"`
	Error          string     `json:"error"`
	ToolCallID     string     `json:"toolCallId"` // of agents, like the following
	AgentType      string     `json:"agentType"`
	Prompt         string     `json:"prompt"`
	LatestResponse string     `json:"latestResponse"`
	Command        string     `json:"command"` // of shells, like the following
	PID            int        `json:"pid"`     // 0 when unknown
	LogPath        string     `json:"logPath"`
}

// Tasks lists the session's work in the background, what is done included.
//
// Experimental: the server's schema marks it so.
func (s *Session) Tasks(ctx context.Context) ([]TaskInfo, error) {
	r, err := ask[struct {
		Tasks []TaskInfo `json:"tasks"`
	}](ctx, s.Call, "session.tasks.list", nil)
	return r.Tasks, err
}

// CancelTask ends work in the background. It returns false when there was none with this id, or it was over.
//
// Experimental: the server's schema marks it so.
func (s *Session) CancelTask(ctx context.Context, id string) (bool, error) {
	r, err := ask[struct {
		Cancelled bool `json:"cancelled"`
	}](ctx, s.Call, "session.tasks.cancel", map[string]string{"id": id})
	return r.Cancelled, err
}

// Queue is what waits for a session's turn to end, or to take it in.
type Queue struct {
	Items            []QueueItem `json:"items"`            // messages and commands, first the next one
	SteeringMessages []string    `json:"steeringMessages"` // for the turn that runs
}

// QueueItem is a message or command that waits.
type QueueItem struct {
	ID          string    `json:"id"`
	MessageID   string    `json:"messageId"` // as [Session.Send] returned it, "" for commands
	Kind        string    `json:"kind"`      // message, command
	DisplayText string    `json:"displayText"`
	AgentMode   AgentMode `json:"agentMode"`
	Source      string    `json:"source"`
}

// Queue returns what waits.
//
// Experimental: the server's schema marks it so.
func (s *Session) Queue(ctx context.Context) (Queue, error) {
	return ask[Queue](ctx, s.Call, "session.queue.pendingItems", nil)
}

// ClearQueue removes everything that waits. The turn that runs goes on.
//
// Experimental: the server's schema marks it so.
func (s *Session) ClearQueue(ctx context.Context) error {
	return s.Call(ctx, "session.queue.clear", nil, nil)
}

// Usage is what a session has used so far.
type Usage struct {
	SessionStartTime        time.Time              `json:"sessionStartTime"`
	CurrentModel            string                 `json:"currentModel"`
	TotalPremiumRequestCost float64                `json:"totalPremiumRequestCost"`
	TotalUserRequests       int64                  `json:"totalUserRequests"`
	TotalNanoAIU            float64                `json:"totalNanoAiu"`
	TotalAPIDurationMs      int64                  `json:"totalApiDurationMs"`
	TokenDetails            map[string]TokenCount  `json:"tokenDetails"` // by token type
	ModelMetrics            map[string]ModelMetric `json:"modelMetrics"` // by model id
	AgentMetrics            map[string]AgentMetric `json:"agentMetrics"` // by agent id; the main one's is main
	CodeChanges             CodeChanges            `json:"codeChanges"`
	LastCallInputTokens     int64                  `json:"lastCallInputTokens"` // of the main agent
	LastCallOutputTokens    int64                  `json:"lastCallOutputTokens"`
}

// Usage returns what the session has used so far.
//
// Experimental: the server's schema marks it so.
func (s *Session) Usage(ctx context.Context) (Usage, error) {
	return ask[Usage](ctx, s.Call, "session.usage.getMetrics", nil)
}

// PermissionMode says who decides on what the agent wants to do.
type PermissionMode string

// The permission modes.
const (
	PermissionsManual   PermissionMode = "manual"    // rules, then SessionConfig.OnPermission
	PermissionsAssisted PermissionMode = "assisted"  // a model approves what is harmless
	PermissionsAllowAll PermissionMode = "allow-all" // everything is approved, nobody is asked
)

// PermissionMode returns the session's permission mode.
//
// Experimental: the server's schema marks it so.
func (s *Session) PermissionMode(ctx context.Context) (PermissionMode, error) {
	r, err := ask[struct {
		Mode PermissionMode `json:"mode"`
	}](ctx, s.Call, "session.permissions.getMode", nil)
	return r.Mode, err
}

// SetPermissionMode changes the session's permission mode, for all its clients. Policies may forbid it.
//
// Experimental: the server's schema marks it so.
func (s *Session) SetPermissionMode(ctx context.Context, mode PermissionMode) error {
	const method = "session.permissions.setMode"
	r, err := ask[outcome](ctx, s.Call, method, map[string]PermissionMode{"mode": mode})
	if err != nil {
		return err
	}
	return r.refusal(s.client, method, s.id)
}

// Truncate removes an event and everything after it from the session's history, and returns how many events that were.
//
// Experimental: the server's schema marks it so.
func (s *Session) Truncate(ctx context.Context, eventID string) (int, error) {
	r, err := ask[struct {
		EventsRemoved int `json:"eventsRemoved"`
	}](ctx, s.Call, "session.history.truncate", map[string]string{"eventId": eventID})
	return r.EventsRemoved, err
}
