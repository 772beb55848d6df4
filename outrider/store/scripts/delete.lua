-- ARGV: fence, or '' to delete whoever owns the session; ms that the deletion is remembered.
if not known() then
  return {'OK', 0}
end
if ARGV[1] ~= '' then
  local refused = refusal(ARGV[1])
  if refused then
    return refused
  end
end
redis.call('DEL', unpack(KEYS))
-- Without this mark, a lease holder would take the session for lost and write it anew. A server that is full may refuse
-- it; the deletion itself it may not.
redis.pcall('HSET', KEYS[1], 'deleted', '1')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {'OK', 1}
